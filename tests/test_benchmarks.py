"""The benchmarks hold their figures to limits. What they measure, ``.ci/nightly`` measures."""

import json
from types import ModuleType

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks.report import LIMITS, Figure, with_limits

pytestmark = pytest.mark.nightly


def test_each_limit_is_held_to_a_figure() -> None:
    """A limit of a benchmark, or of a figure, that is not there is an error."""
    assert set(json.loads(LIMITS.read_text())) <= set(command.find_benchmarks())
    with pytest.raises(LookupError, match="django-redis / raw"):
        with_limits("locks", [])


@pytest.mark.parametrize(("value", "status"), [(1.1, 0), (1.2, 1)])
def test_the_command_fails_when_a_limit_is_missed(
    value: float, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status and the table say whether all limits were kept."""
    benchmark = ModuleType("locks")
    rate = Figure("rate", 100, 100, better="higher")
    benchmark.run = lambda servers: [Figure("a", value, 1.1), Figure("b", 3.0), rate]  # type: ignore[attr-defined]
    monkeypatch.setattr(command, "import_module", lambda name: benchmark)
    monkeypatch.setattr(command, "with_limits", lambda name, figures: figures)
    assert command.main(["locks"]) == status
    assert ("MISSED" in capsys.readouterr().out) is bool(status)
