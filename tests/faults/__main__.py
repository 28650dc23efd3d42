"""
Runs scenarios in which processes and servers fail, and lets their oracles check what happened.

Without a scenario it lists them; a scenario's own options follow its name:
``python -m tests.faults locks --nemesis restart outbox --broken last-id --seed 3``.
The exit status is 0 if all promises were kept, 1 if an oracle found a violation, as it must with
--broken, and 2 if a run could not be done. All servers are private and started for the run.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Container, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import django

from tests.faults.lab import Lab
from tests.faults.scenario import Plan, Scenario, option_name
from tests.faults.verdict import print_verdict
from tests.servers import ServerPool
from tests.servers.databases import Databases

#: Exit statuses.
CLEAN, VIOLATED, UNDONE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios that the command line names; return the exit status."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    common, chosen = parse(sys.argv[1:] if arguments is None else arguments)
    if not chosen:
        print_list()
    statuses = [run(number, *one, common) for number, one in enumerate(chosen, 1)]
    return max(statuses, default=CLEAN)


def print_list() -> None:
    """Print the scenarios with one line each."""
    for name, scenario in scenarios().items():
        print(f"{name:8}{scenario.summary}")


def scenarios() -> dict[str, Scenario]:
    """Return all scenarios by their names; they have models, so Django is set up before."""
    from tests.faults.scenarios import SCENARIOS

    return {scenario.name: scenario for scenario in SCENARIOS}


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[tuple[Scenario, Plan]]]:
    """Return the options for all scenarios, and each scenario that is named, with its plan."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        usage="%(prog)s [SCENARIO [OPTION...]]... [--seed N] [--keep FOLDER] [--json]",
        epilog="SCENARIO -h shows the options of a scenario.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same plan")
    parser.add_argument("--keep", type=Path, help="folder for the files of each run's witnesses")
    parser.add_argument("--json", action="store_true", help="print one JSON object a scenario")
    common, rest = parser.parse_known_args(arguments)
    known = scenarios()
    groups = split(rest, known)
    if groups[0]:
        parser.add_argument("-h", "--help", action="help")
        parser.parse_args(groups[0])
    return common, [make_plan(known[name], options, common.seed) for name, *options in groups[1:]]


def split(arguments: Sequence[str], names: Container[str]) -> list[list[str]]:
    """Return what stands before the first of these names, and each name with what follows it."""
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument in names:
            groups.append([])
        groups[-1].append(argument)
    return groups


def make_plan(scenario: Scenario, options: Sequence[str], seed: int) -> tuple[Scenario, Plan]:
    """Read a scenario's own options."""
    prog, text = f"python -m tests.faults {scenario.name}", scenario.summary
    parser = argparse.ArgumentParser(prog=prog, description=text)
    scenario.add_options(parser)
    plan: Plan = scenario.plan(seed=seed, **vars(parser.parse_args(options)))
    if (objection := plan.objection()) is not None:
        parser.error(objection)
    return scenario, plan


def run(number: int, scenario: Scenario, plan: Plan, common: argparse.Namespace) -> int:
    """Record and check the n-th run, print the verdict and return its exit status."""
    began = time.monotonic()
    try:
        history = record(f"{number}-{scenario.name}", scenario, plan, common.keep)
    except Exception:
        traceback.print_exc()
        return UNDONE
    seconds = round(time.monotonic() - began, 1)
    violations = scenario.oracle.check(history)
    planned = {"scenario": scenario.name, **shown(scenario, plan)}
    result = {**planned, **scenario.oracle.count(history), "seconds": seconds}
    print_verdict(result, violations, as_json=common.json)
    return VIOLATED if violations else CLEAN


def record(name: str, scenario: Scenario, plan: Plan, keep: Path | None) -> Any:
    """Record a run with servers of its own; its witnesses write into a folder of this name."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
        kept = (folder / "witness" if keep is None else keep) / name
        kept.mkdir(parents=True)
        servers = stack.enter_context(ServerPool())
        databases = Databases(servers, folder)
        lab = Lab(
            kept, servers.get, lambda kind: stack.enter_context(databases.alias(kind, folder))
        )
        with lab:
            return scenario.record(plan, lab)


def shown(scenario: Scenario, plan: Plan) -> dict[str, Any]:
    """Return what the verdict shows of a plan: the options, which no figure is named like."""
    broken = {"--broken": plan.broken or "nothing"} if scenario.variants else {}
    values = {option_name(name): getattr(plan, name) for name in plan.options()}
    return {"--seed": plan.seed, **broken, **values}


if __name__ == "__main__":
    sys.exit(main())
