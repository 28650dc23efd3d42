"""How ``manage.py celery_locks doctor`` prints what ``locks.doctor`` finds."""

from __future__ import annotations

import json
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Any, Final

from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from .. import conf
from ..exceptions import CelerySafeError
from ..locks.doctor import Finding, Verdict, examine
from .console import ending_with_its_reader, fill

#: Fewest and most processes that race.
FEWEST: Final = 2
MOST: Final = 64
#: Columns of a verdict and of a check's name, and of the space behind each.
COLUMNS: Final = (9, 12)

#: Verdicts, the one that counts most first, and the exit status for which each stands.
STATUSES: Final = {Verdict.UNSAFE: 1, Verdict.UNKNOWN: 2, Verdict.WARNING: 0, Verdict.OK: 0}
#: The exit status when somebody pressed Ctrl-C: that of a shell.
STOPPED: Final = 130


def add_doctor(parser: ArgumentParser) -> None:
    """Add the options of the action, but ``--cache`` and ``--json``, which all actions have."""
    parser.add_argument(
        "--processes",
        type=_processes,
        default=FEWEST,
        metavar="N",
        help=f"how many processes race for a lock ({FEWEST})",
    )


def run_doctor(command: BaseCommand, cache: str | conf.Unset, options: Mapping[str, Any]) -> None:
    """
    Examine the store and print what is found.

    Raises:
        CommandError: With the exit status 1 if something is unsafe, 2 if something could
            not be found out, 130 after Ctrl-C.
    """
    found: list[Finding] = []
    try:
        with (
            ending_with_its_reader(command.stdout),
            closing(examine(cache, processes=options["processes"])) as findings,
        ):
            found = report(findings, as_json=options["as_json"], stdout=command.stdout)
    except CelerySafeError as error:
        raise CommandError(str(error), returncode=STATUSES[Verdict.UNKNOWN]) from error
    except KeyboardInterrupt:
        raise CommandError(
            "Stopped; nothing of the examination is left.", returncode=STOPPED
        ) from None
    if not found:
        raise CommandError(
            "Nobody reads what is found, so the examination was stopped.",
            returncode=STATUSES[Verdict.UNKNOWN],
        )
    worst = find_worst(found)
    checks = ", ".join(finding.check for finding in found if finding.verdict is worst)
    if worst is Verdict.UNSAFE:
        text = f"Locks are not safe here: {checks}."
    elif worst is Verdict.UNKNOWN:
        text = f"Whether locks are safe here is not known: {checks}."
    else:
        return
    raise CommandError(text, returncode=STATUSES[worst])


def report(findings: Iterable[Finding], *, as_json: bool, stdout: OutputWrapper) -> list[Finding]:
    """Print findings as they come, or all of them as one JSON object, and return them."""
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            stdout.write(as_lines(finding))
            stdout.flush()
    worst = find_worst(found)
    if as_json:
        rows = [finding._asdict() for finding in found]
        stdout.write(json.dumps({"verdict": worst, "findings": rows}, indent=2))
    elif STATUSES[worst] == 0:
        warnings = sum(finding.verdict is Verdict.WARNING for finding in found)
        stdout.write(f"Locks are safe here; {warnings} warning(s).")
    return found


def as_lines(finding: Finding) -> str:
    """Return a finding as lines of at most 80 columns."""
    verdict, check = COLUMNS
    head = f"{finding.verdict:<{verdict}}{finding.check:<{check}}"
    return fill(finding.said, head, " " * len(head))


def find_worst(found: Sequence[Finding]) -> Verdict:
    """Return the verdict on all of them together."""
    return next(one for one in STATUSES if any(finding.verdict is one for finding in found))


def _processes(text: str) -> int:
    with suppress(ValueError):
        if FEWEST <= (count := int(text)) <= MOST:
            return count
    raise ArgumentTypeError(f"{text!r} is no whole number from {FEWEST} to {MOST}")
