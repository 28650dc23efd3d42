"""
Runs scenarios in which processes and servers fail, and lets their oracles check what happened.

Without a scenario it lists them; a scenario's own options follow its name:
``python -m tests.faults locks --nemesis restart outbox --broken last-id --seed 3``.
The exit status is 0 if all promises were kept, 1 if an oracle found a violation, as it must with
--broken, and 2 if a run could not be done. All servers are private and started for the run.

``all`` stands for every scenario and for every deliberate fault, in about an hour, or in five
minutes with ``--form short``; there the status is 1 if a fault was not found.
"""

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import django

from tests.evidence.files import save
from tests.faults.forms import FORMS, commands
from tests.faults.lab import Lab
from tests.faults.oracle import TOO_LITTLE, Violation
from tests.faults.scenario import Plan, Scenario, option_name
from tests.servers import ServerPool
from tests.servers.databases import Databases

#: Exit statuses.
CLEAN, VIOLATED, UNDONE = 0, 1, 2

#: Violations that are printed in full.
SHOWN = 10

#: The name that stands for all runs of a form.
ALL = "all"


class Chosen(NamedTuple):
    """A run that the command line asks for; its fault, if any, has to be found."""

    scenario: Scenario
    plan: Plan
    to_be_found: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scenarios that the command line names; return the exit status."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    typed = sys.argv[1:] if arguments is None else arguments
    common, chosen = parse(typed)
    if not chosen:
        print_list()
    done = [run(number, one, common) for number, one in enumerate(chosen, 1)]
    if common.save:
        print(f"Saved in {save('faults', typed, [result for _, result in done])}.", file=sys.stderr)
    return max((status for status, _ in done), default=CLEAN)


def print_list() -> None:
    """Print the scenarios with one line each."""
    for name, scenario in scenarios().items():
        print(f"{name:8}{scenario.summary}")


def scenarios() -> dict[str, Scenario]:
    """Return all scenarios by their names; they have models, so Django is set up before."""
    from tests.faults.scenarios import SCENARIOS

    return {scenario.name: scenario for scenario in SCENARIOS}


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Chosen]]:
    """Return the options for all scenarios, and each scenario that is named, with its plan."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults",
        description=__doc__,
        usage="%(prog)s [SCENARIO [OPTION...] | all [--form FORM]]... "
        "[--seed N] [--keep FOLDER] [--save]",
        epilog="SCENARIO -h shows the options of a scenario.",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same plan")
    parser.add_argument("--keep", type=Path, help="folder for the files of each run's witnesses")
    parser.add_argument("--save", action="store_true", help="write a file into docs/evidence")
    common, rest = parser.parse_known_args(arguments)
    known = scenarios()
    groups = split(rest, {*known, ALL})
    if groups[0]:
        parser.add_argument("-h", "--help", action="help")
        parser.parse_args(groups[0])
    chosen: list[Chosen] = []
    for name, *options in groups[1:]:
        if name == ALL:
            chosen += choose_all(options, known, common.seed)
        else:
            chosen.append(Chosen(*make_plan(known[name], options, common.seed)))
    return common, chosen


def split(arguments: Sequence[str], names: Container[str]) -> list[list[str]]:
    """Return what stands before the first of these names, and each name with what follows it."""
    groups: list[list[str]] = [[]]
    for argument in arguments:
        if argument in names:
            groups.append([])
        groups[-1].append(argument)
    return groups


def choose_all(options: Sequence[str], known: Mapping[str, Scenario], seed: int) -> list[Chosen]:
    """Return the runs of a form, the long one unless another is named."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.faults {ALL}")
    parser.add_argument("--form", choices=FORMS, default="long", help="default: %(default)s")
    runs = commands(parser.parse_args(options).form, known)
    plans = [make_plan(known[name], given, seed) for name, *given in runs]
    return [Chosen(*each, to_be_found=bool(each[1].broken)) for each in plans]


def make_plan(scenario: Scenario, options: Sequence[str], seed: int) -> tuple[Scenario, Plan]:
    """Read a scenario's own options."""
    prog, text = f"python -m tests.faults {scenario.name}", scenario.summary
    parser = argparse.ArgumentParser(prog=prog, description=text)
    scenario.add_options(parser)
    plan: Plan = scenario.plan(seed=seed, **vars(parser.parse_args(options)))
    if (objection := plan.objection()) is not None:
        parser.error(objection)
    return scenario, plan


def run(number: int, chosen: Chosen, common: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Record and check the n-th run, print the verdict; return the exit status and the result."""
    scenario, plan, to_be_found = chosen
    planned = {"scenario": scenario.name, **shown(scenario, plan)}
    began = time.monotonic()
    try:
        history = record(f"{number}-{scenario.name}", scenario, plan, common.keep)
    except Exception as error:
        traceback.print_exc()
        return UNDONE, {**planned, "error": repr(error)}
    seconds = round(time.monotonic() - began, 1)
    violations = scenario.oracle.check(history)
    result = {**planned, **scenario.oracle.count(history), "seconds": seconds}
    if plan.broken:
        checks = {each.check for each in violations}
        result["found"] = bool(checks & set(scenario.variants[plan.broken]))
    print_verdict(result, violations)
    is_clean = result["found"] if to_be_found else not violations
    rest = {
        "violations": len(violations),
        "scarce": [each.text for each in violations if each.check == TOO_LITTLE],
        "measured": scenario.oracle.measure(history),
    }
    return CLEAN if is_clean else VIOLATED, {**result, **rest}


def print_verdict(result: Mapping[str, Any], violations: Sequence[Violation]) -> None:
    """Print a run's plan and figures, and which promises were broken in it."""
    for name, value in {**result, "violations": len(violations)}.items():
        text = value if isinstance(value, str) else format(value, ",")
        print(f"{name}{text:>{80 - len(name)}}")
    for check, text, details in violations[:SHOWN]:
        print("", check, f"  {text}", *(f"  {line}" for line in details), sep="\n")


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
