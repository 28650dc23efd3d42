"""
Runs scenarios in which processes and servers fail, and lets their oracles check what happened.

A scenario's own options follow its name: ``python -m tests.faults outbox --broken last-id``.
The exit status is 0 if all promises were kept, or the deliberate fault was found; 1 if not; and 2
if a run could not be done. All servers are private and started for the run.

``all`` stands for every scenario and for every deliberate fault, in about an hour, or in five
minutes with ``--form short``.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import django

from tests.evidence.files import save
from tests.faults.forms import FORMS, commands
from tests.faults.lab import Lab
from tests.faults.oracle import TOO_LITTLE, Violation
from tests.faults.scenario import AnyPlan, Scenario, option_name
from tests.servers import ServerPool
from tests.servers.databases import Databases

#: Exit statuses.
CLEAN, VIOLATED, UNDONE = 0, 1, 2

#: Violations that are printed in full.
SHOWN = 10

#: The name that stands for all runs of a form.
ALL = "all"

#: Options that are no part of a plan.
OTHERS = {"name", "keep", "save"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; return the exit status."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    typed = sys.argv[1:] if arguments is None else arguments
    options, chosen = parse(typed)
    done = [run(number, *each, options.keep) for number, each in enumerate(chosen, 1)]
    if options.save:
        print(f"Saved in {save('faults', typed, [result for _, result in done])}.", file=sys.stderr)
    return max(status for status, _ in done)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[Scenario, AnyPlan]]]:
    """Return the options, and each scenario that is to be run, with its plan."""
    from tests.faults.scenarios import SCENARIOS  # they have models

    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument("--seed", type=int, default=0, help="the same seed gives the same plan")
    common.add_argument("--keep", type=Path, help="folder for the files of each run's witnesses")
    common.add_argument("--save", action="store_true", help="write a file into docs/evidence")
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True)
    known = {scenario.name: scenario for scenario in SCENARIOS}
    for name, scenario in known.items():
        scenario.add_options(names.add_parser(name, parents=[common], help=scenario.summary))
    every = names.add_parser(ALL, parents=[common], help="all of them, and all deliberate faults")
    every.add_argument("--form", choices=FORMS, default="long", help="default: %(default)s")
    options, rest = common.parse_known_args(arguments)
    starts = [place for place, word in enumerate(rest) if word in {*known, ALL}] or [0]
    runs = [rest[begin:end] for begin, end in pairwise([*starts, None])]
    chosen = []
    while runs:
        each = parser.parse_args([*runs.pop(0), "--seed", str(options.seed)])
        if each.name == ALL:
            runs += commands(each.form, known)
            continue
        given = {name: value for name, value in vars(each).items() if name not in OTHERS}
        chosen.append((known[each.name], known[each.name].plan(**given)))
    return options, chosen


def run(
    number: int, scenario: Scenario, plan: AnyPlan, keep: Path | None
) -> tuple[int, dict[str, Any]]:
    """Record and check the n-th run, print the verdict; return the exit status and the result."""
    planned = {"scenario": scenario.name, **shown(scenario, plan)}
    began = time.monotonic()
    try:
        history = record(f"{number}-{scenario.name}", scenario, plan, keep)
    except Exception as error:
        traceback.print_exc()
        return UNDONE, {**planned, "error": repr(error)}
    seconds = round(time.monotonic() - began, 1)
    violations = scenario.oracle.check(history)
    result = {**planned, **scenario.oracle.count(history), "seconds": seconds}
    is_good = not violations
    if plan.broken:
        checks = {each.check for each in violations}
        is_good = result["found"] = bool(checks & set(scenario.variants[plan.broken]))
    print_verdict(result, violations)
    rest = {
        "violations": len(violations),
        "scarce": [each.text for each in violations if each.check == TOO_LITTLE],
        "measured": scenario.oracle.measure(history),
    }
    return CLEAN if is_good else VIOLATED, {**result, **rest}


def print_verdict(result: Mapping[str, Any], violations: Sequence[Violation]) -> None:
    """Print a run's plan and figures, and which promises were broken in it."""
    for name, value in {**result, "violations": len(violations)}.items():
        text = value if isinstance(value, str) else format(value, ",")
        print(f"{name}{text:>{80 - len(name)}}")
    for check, text in violations[:SHOWN]:
        print("", check, *(f"  {line}" for line in text.splitlines()), sep="\n")


def record(name: str, scenario: Scenario, plan: AnyPlan, keep: Path | None) -> Any:
    """Record a run with servers of its own; its witnesses write into a folder of this name."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        kept = (folder / "witness" if keep is None else keep) / name
        kept.mkdir(parents=True)
        servers = stack.enter_context(ServerPool())
        databases = Databases(servers, folder)

        def make_database(kind: Any) -> str:
            return stack.enter_context(databases.alias(kind, folder))

        with Lab(kept, servers.get, make_database) as lab:
            return scenario.record(plan, lab)


def shown(scenario: Scenario, plan: AnyPlan) -> dict[str, Any]:
    """Return what the verdict shows of a plan: the options, which no figure is named like."""
    broken = {"--broken": plan.broken or "nothing"} if scenario.variants else {}
    values = {option_name(name): getattr(plan, name) for name in plan.options()}
    return {"--seed": plan.seed, **broken, **values}


if __name__ == "__main__":
    sys.exit(main())
