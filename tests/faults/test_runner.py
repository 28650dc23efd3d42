"""The runner of the scenarios, as the command line has it, and the points at which they kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from django_celery_safe.sending import commit
from tests.evidence import files
from tests.faults import __main__ as runner
from tests.faults import scenarios
from tests.faults.forms import FORMS, SMALL
from tests.faults.lab import Lab
from tests.faults.oracle import Oracle, Shown
from tests.faults.outbox import nemesis, points
from tests.faults.outbox.plan import SENDER
from tests.faults.outbox.plan import Plan as OutboxPlan
from tests.faults.outbox.plan import Witness as OutboxWitness
from tests.faults.scenario import Plan, Scenario
from tests.faults.scenarios import SCENARIOS

pytestmark = pytest.mark.nightly


def make_scenario(*numbers: int) -> Scenario:
    """Return a scenario that records these numbers, of which none may be even; none: it fails."""

    def evens(history: list[int]) -> Any:
        return (Shown(f"{one} is even.", ("as 4 is",)) for one in history if one % 2 == 0)

    def record(plan: Plan, lab: Lab) -> list[int]:
        if not numbers:
            raise TimeoutError("too slow")
        return [*numbers]

    oracle: Oracle[list[int]] = Oracle(lambda history: {"numbers": len(history)}, [evens])
    return Scenario("numbers", "Some numbers.", Plan, record, oracle, {"odd": ("evens",)})


@pytest.mark.parametrize(("numbers", "status"), [((1, 3), 0), ((1, 2), 1), ((), 2)])
def test_the_exit_status_is_the_verdict(
    numbers: tuple[int, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """0 is clean, 1 a violation, 2 a run that could not be done; the worst of all runs decides."""
    monkeypatch.setattr(scenarios, "SCENARIOS", (make_scenario(*numbers),))
    arguments = ["numbers", "numbers", "--seed", "3", "--json", "--keep", str(tmp_path)]
    assert runner.main(arguments) == status
    printed = capsys.readouterr()
    assert ("too slow" in printed.err) is (status == 2)
    for line in printed.out.splitlines():
        result = json.loads(line)
        assert (result["scenario"], result["--seed"], result["numbers"]) == ("numbers", 3, 2)
        assert result["violations"] == len(result["shown"]) == status
    assert {path.name for path in tmp_path.iterdir()} == {"1-numbers", "2-numbers"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["unknown"],
        ["tasks", "--keys", "many"],
        ["locks", "--store", "postgres", "--nemesis", "restart"],
    ],
)
def test_a_wrong_command_line_runs_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and the message says what is wrong; a database loses nothing."""
    with pytest.raises(SystemExit) as ended:
        runner.main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("form", FORMS)
def test_all_stands_for_each_scenario_and_its_faults(form: str) -> None:
    """Each run of a form is one that the command line takes, and a fault in it is to be found."""
    _, chosen = runner.parse(["all", "--form", form, "--seed", "7"])
    faults = {(one.scenario.name, one.plan.broken) for one in chosen if one.to_be_found}
    each = {(one.name, fault) for one in SCENARIOS for fault in one.variants}
    assert faults < each if form == "short" else faults == each
    names = {one.scenario.name for one in chosen if not one.plan.broken}
    assert names == (set() if form == "faults" else {one.name for one in SCENARIOS})
    assert {one.plan.seed for one in chosen} == {7}


@pytest.mark.parametrize(("numbers", "status"), [((1, 2), 0), ((1, 3), 1)])
def test_all_saves_what_was_found(
    numbers: tuple[int, ...], status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There the status is that of a fault that was found or not, and a file keeps it."""
    monkeypatch.setattr(scenarios, "SCENARIOS", (make_scenario(*numbers),))
    monkeypatch.setitem(SMALL, "numbers", "")
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    # Else each program is asked, which takes a minute on a busy machine.
    monkeypatch.setattr(files, "find_versions", lambda: {"Python": "3.11"})
    for _ in range(2):
        assert runner.main(["all", "--form", "faults", "--save", "--seed", "3"]) == status
    evidence, _ = files.load("faults", tmp_path)
    assert evidence.command == "python -m tests.faults all --form faults --save --seed 3"
    (result,) = evidence.results
    assert (result["--broken"], result["found"]) == ("odd", status == 0)
    assert evidence.versions == {"Python": "3.11"}


def test_a_point_at_a_name_that_is_gone_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run whose process could never come to its point does not begin."""
    points.check_names()
    monkeypatch.delattr(commit, "keep")
    with pytest.raises(LookupError, match=r"No sender can die before the INSERT.*commit\.keep"):
        points.check_names()


def test_a_point_that_is_never_reached_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A run does not wait until its end for a process that does not come to its point."""
    monkeypatch.setattr(nemesis, "REACHED_WITHIN", 0.0)
    point = "before the INSERT"
    plan, witness = OutboxPlan(transactions=1), OutboxWitness(tmp_path)
    witness.end()
    victim = nemesis.Victim(plan, witness, SENDER, 0, [point], {})
    victim.tend()
    with pytest.raises(RuntimeError, match=f"No sender comes to the point '{point}'"):
        victim.tend()
    victim.close()


@pytest.mark.parametrize(
    "scenario", [one for one in SCENARIOS if one.variants], ids=lambda one: one.name
)
def test_a_deliberate_fault_is_found(scenario: Scenario, tmp_path: Path) -> None:
    """Each oracle finds the first of its scenario's variants in a real run."""
    fault = next(iter(scenario.variants))
    arguments = [scenario.name, *SMALL[scenario.name].split(), "--broken", fault]
    (chosen,) = runner.parse(arguments)[1]
    history = runner.record("run", scenario, chosen.plan, tmp_path)
    assert scenario.oracle.found(history) & set(scenario.variants[fault])
