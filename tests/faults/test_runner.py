"""The runner of the scenarios, as the command line has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.evidence import files
from tests.faults import __main__ as runner
from tests.faults import scenarios
from tests.faults.forms import FORMS, SMALL
from tests.faults.lab import Lab
from tests.faults.oracle import Oracle, Shown, Violation
from tests.faults.scenario import Plan, Scenario
from tests.faults.scenarios import SCENARIOS
from tests.faults.verdict import print_verdict

pytestmark = pytest.mark.nightly

BOTH = [{"check": "evens", "text": "2 is even.", "details": ["as 4 is"]}]


def make_scenario(*numbers: int, error: Exception | None = None) -> Scenario:
    """Return a scenario that records these numbers, of which none may be even."""

    def evens(history: list[int]) -> Any:
        return (Shown(f"{one} is even.", ("as 4 is",)) for one in history if one % 2 == 0)

    def record(plan: Plan, lab: Lab) -> list[int]:
        if error is not None:
            raise error
        return [*numbers]

    oracle: Oracle[list[int]] = Oracle(lambda history: {"numbers": len(history)}, [evens])
    return Scenario("numbers", "Some numbers.", Plan, record, oracle, {"odd": ("evens",)})


@pytest.mark.parametrize(
    ("numbers", "error", "status"),
    [((1, 3), None, 0), ((1, 2), None, 1), ((), TimeoutError("too slow"), 2)],
)
def test_the_exit_status_is_the_verdict(
    numbers: tuple[int, ...],
    error: Exception | None,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """0 is clean, 1 a violation, and 2 a run that could not be done, which says why."""
    monkeypatch.setattr(scenarios, "SCENARIOS", (make_scenario(*numbers, error=error),))
    assert runner.main(["numbers", "--seed", "3", "--json"]) == status
    printed = capsys.readouterr()
    if error is not None:
        assert "too slow" in printed.err
        return
    result = json.loads(printed.out)
    assert (result["scenario"], result["--seed"], result["numbers"]) == ("numbers", 3, 2)
    assert result["shown"] == (BOTH if status else [])


def test_the_worst_run_decides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each scenario is run and printed, with its own options, and its witnesses' files are kept."""
    monkeypatch.setattr(scenarios, "SCENARIOS", (make_scenario(2),))
    kept = tmp_path / "kept"
    (kept / "2-numbers").mkdir(parents=True)  # so that the second run can't be done
    arguments = ["numbers", "--broken", "odd", "--json", "--keep", str(kept), "numbers"]
    assert runner.main(arguments) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["--broken"] == "odd"
    assert (kept / "1-numbers").is_dir()


def test_without_a_scenario_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """One line for each, as wide as a terminal."""
    assert runner.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [scenario.name for scenario in SCENARIOS]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("arguments", [["unknown"], ["tasks", "--keys", "many"], ["--keys", "2"]])
def test_a_wrong_command_line_runs_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status is 2, and the message says what is wrong."""
    with pytest.raises(SystemExit) as ended:
        runner.main(arguments)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_the_options_are_the_plan(scenario: Scenario) -> None:
    """The same command line gives the same plan, and another seed another one."""
    plans = [runner.parse([scenario.name, "--seed", seed])[1][0].plan for seed in "112"]
    assert plans[0] == plans[1] == scenario.plan(seed=1)
    assert plans[2] == scenario.plan(seed=2)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_each_fault_is_looked_for_by_a_check(scenario: Scenario) -> None:
    """A variant names checks that the oracle has."""
    checks = {check.__name__.replace("_", " ") for check in scenario.oracle.checks}
    assert {name for names in scenario.variants.values() for name in names} <= checks


@pytest.mark.parametrize("form", FORMS)
def test_all_stands_for_each_scenario_and_its_faults(form: str) -> None:
    """Each run of a form is one that the command line takes, and a fault in it is to be found."""
    _, chosen = runner.parse(["all", "--form", form, "--seed", "7"])
    assert {one.scenario.name for one in chosen} == {one.name for one in SCENARIOS}
    assert {one.plan.seed for one in chosen} == {7}
    faults = {(one.scenario.name, one.plan.broken) for one in chosen if one.to_be_found}
    each = {(one.name, fault) for one in SCENARIOS for fault in one.variants}
    assert faults == each if form == "long" else faults < each


@pytest.mark.parametrize(("numbers", "status"), [((1, 2), 0), ((1, 3), 1)])
def test_all_saves_what_was_found(
    numbers: tuple[int, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """There the status is that of a fault that was found or not, and a file keeps it."""
    monkeypatch.setattr(scenarios, "SCENARIOS", (make_scenario(*numbers),))
    monkeypatch.setitem(FORMS, "short", ())
    monkeypatch.setitem(SMALL, "numbers", "")
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    for _ in range(2):
        assert runner.main(["all", "--form", "short", "--save", "--seed", "3"]) == status
    evidence, second = files.load("faults", tmp_path)
    assert evidence.results == second.results
    assert evidence.command == "python -m tests.faults all --form short --save --seed 3"
    (result,) = evidence.results
    assert (result["--broken"], result["found"]) == ("odd", status == 0)
    assert result["violations"] == 1 - status
    assert evidence.versions["Redis"]


def test_the_verdict_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """The output for readers has at most 80 columns, and at most ten violations."""
    violations = [Violation("evens", "A number is even. " * 20, ("token " + "x" * 60,))] * 12
    print_verdict({"scenario": "numbers", "numbers": 12_000}, violations, as_json=False)
    text = capsys.readouterr().out
    assert text.count("\nevens\n") == 10
    assert "12,000" in text
    assert "2 more" in text
    assert max(map(len, text.splitlines())) <= 80
