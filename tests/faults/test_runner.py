"""The runner of the scenarios, as the command line has it."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.evidence import files
from tests.faults import __main__ as runner
from tests.faults import scenarios
from tests.faults.forms import SMALL
from tests.faults.lab import Lab
from tests.faults.oracle import Oracle, Shown
from tests.faults.scenario import Plan, Scenario

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


@pytest.mark.parametrize(
    ("command", "numbers", "status"),
    [
        ("numbers numbers", (1, 3), 0),
        ("numbers", (1, 2), 1),
        ("numbers", (), 2),
        ("all --form faults", (1, 2), 0),
        ("all --form faults", (1, 3), 1),
    ],
)
def test_the_exit_status_is_the_verdict(
    command: str,
    numbers: tuple[int, ...],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """
    0 is clean, 1 a violation, 2 a run that could not be done; the worst of all runs decides.

    For a deliberate fault 0 says that it was found. A file keeps all that is printed.
    """
    monkeypatch.setattr(scenarios, "SCENARIOS", (make_scenario(*numbers),))
    monkeypatch.setitem(SMALL, "numbers", "")
    monkeypatch.setattr(files, "FOLDER", tmp_path)
    # Otherwise each program is asked, which takes a minute on a busy machine.
    monkeypatch.setattr(files, "find_versions", lambda: {"Python": "3.11"})
    assert runner.main([*command.split(), "--seed", "3", "--json", "--save"]) == status
    printed = capsys.readouterr()
    assert ("too slow" in printed.err) is (status == 2)
    (evidence,) = files.load("faults", tmp_path)
    assert evidence.command == f"python -m tests.faults {command} --seed 3 --json --save"
    assert len(evidence.results) == max(1, command.count("numbers"))
    saved = iter(evidence.results)
    for line in printed.out.splitlines():
        result = json.loads(line)
        assert (result["scenario"], result["--seed"], result["numbers"]) == ("numbers", 3, 2)
        assert result["violations"] == len(result["shown"]) == next(saved)["violations"]
