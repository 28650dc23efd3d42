"""The output of ``manage.py celery_locks doctor`` for the findings of ``inspection.doctor``."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from .. import conf
from ..exceptions import CelerySafeError
from ..inspection.doctor import examine
from ..inspection.findings import OK, UNKNOWN, UNSAFE, WARNING, Finding, Verdict
from .console import ending_with_its_reader, fill

#: Minimum and maximum number of processes that race.
FEWEST: Final = 2
MOST: Final = 64

#: Verdicts, worst first, with the exit status of each.
STATUSES: Final = {UNSAFE: 1, UNKNOWN: 2, WARNING: 0, OK: 0}
#: The exit status after Ctrl-C, the same as a shell's.
STOPPED: Final = 130


def add_doctor(parser: ArgumentParser) -> None:
    """Add the action's options except ``--cache`` and ``--json``, which all actions have."""
    parser.add_argument(
        "--processes",
        type=_processes,
        default=FEWEST,
        metavar="N",
        help=f"how many processes race for a lock ({FEWEST})",
    )


def run_doctor(command: BaseCommand, cache: str | conf.Unset, options: Mapping[str, Any]) -> None:
    """
    Examine the store and print the findings.

    Raises:
        CommandError: With the exit status 1 if something is unsafe, 2 if a check had no
            result, 130 after Ctrl-C.
    """
    printed: list[Finding] = []
    try:
        with (
            ending_with_its_reader(command.stdout),
            closing(examine(cache, processes=options["processes"])) as findings,
        ):
            printed = _print(findings, as_json=options["as_json"], stdout=command.stdout)
    except CelerySafeError as error:
        raise CommandError(str(error), returncode=STATUSES[UNKNOWN]) from error
    except KeyboardInterrupt:
        raise CommandError(
            "Stopped; nothing of the examination is left.", returncode=STOPPED
        ) from None
    if not printed:
        text = "The reader of the output has gone, so the examination was stopped."
        raise CommandError(text, returncode=STATUSES[UNKNOWN])
    worst = _worst_of(printed)
    if STATUSES[worst]:
        checks = ", ".join(finding.check for finding in printed if finding.verdict is worst)
        unknown = "Whether locks are safe here is not known"
        text = "Locks are not safe here" if worst is UNSAFE else unknown
        raise CommandError(f"{text}: {checks}.", returncode=STATUSES[worst])


def _print(findings: Iterable[Finding], *, as_json: bool, stdout: OutputWrapper) -> list[Finding]:
    """Print findings as they arrive, or all of them as one JSON object, and return them."""
    printed = []
    for finding in findings:
        printed.append(finding)
        if not as_json:
            head = f"{finding.verdict:<9}{finding.check:<12}"
            stdout.write(fill(finding.said, head, " " * len(head)))
            stdout.flush()
    worst = _worst_of(printed)
    if as_json:
        rows = [finding.as_row() for finding in printed]
        stdout.write(json.dumps({"verdict": worst, "findings": rows}, indent=2))
    elif STATUSES[worst] == 0:
        warnings = sum(finding.verdict is WARNING for finding in printed)
        stdout.write(f"Locks are safe here; {warnings} warning(s).")
    return printed


def _worst_of(findings: Sequence[Finding]) -> Verdict:
    """Return the worst verdict of these findings."""
    verdicts = {finding.verdict for finding in findings}
    return next(verdict for verdict in STATUSES if verdict in verdicts)


def _processes(text: str) -> int:
    with suppress(ValueError):
        if FEWEST <= (count := int(text)) <= MOST:
            return count
    raise ArgumentTypeError(f"{text!r} is not a whole number from {FEWEST} to {MOST}")
