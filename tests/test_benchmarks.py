"""The benchmarks' harness: ratios within a round, limits, and what is printed."""

import json
from types import ModuleType

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import report
from tests.benchmarks.report import Figure, interleaved, ratio, with_limits


def test_a_ratio_compares_within_rounds() -> None:
    """A round in which the whole machine was slow does not change the ratio."""
    samples = {"floor": [1.0, 10.0, 1.0], "ours": [2.0, 20.0, 2.0]}
    assert ratio(samples, "ours", "floor") == 2


def test_candidates_are_measured_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate has one sample for each round, in µs per call."""
    monkeypatch.setattr(report, "WARM_UP", 0.01)
    samples = interleaved({"little": lambda: sum(range(10)), "much": lambda: sum(range(5000))}, 5)
    assert {name: len(values) for name, values in samples.items()} == {"little": 5, "much": 5}
    assert ratio(samples, "much", "little") > 5


@pytest.mark.parametrize(
    ("figure", "ok"),
    [
        (Figure("ratio", 1.15, limit=1.15), True),
        (Figure("ratio", 1.151, limit=1.15), False),
        (Figure("messages/s", 99, limit=100, better="higher"), False),
        (Figure("messages/s", 100, limit=100, better="higher"), True),
        (Figure("peer", 9.9), True),
    ],
)
def test_a_figure_keeps_to_its_limit(figure: Figure, ok: bool) -> None:
    """A limit is the worst value allowed; a figure without one is only for comparison."""
    assert figure.ok is ok


def test_a_limit_without_a_figure_is_an_error() -> None:
    """A limit that nothing is held to is noticed."""
    with pytest.raises(LookupError, match="django-redis / raw"):
        with_limits("locks", [])


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (1.2, 1)])
def test_the_command_fails_when_a_limit_is_missed(
    value: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``--json`` prints one object; the exit status says whether all limits were kept."""
    benchmark = ModuleType("locks")
    benchmark.run = lambda servers: [Figure("a", value, 1.1), Figure("b", 3.0)]  # type: ignore[attr-defined]
    monkeypatch.setattr(command, "import_module", lambda name: benchmark)
    monkeypatch.setattr(command, "with_limits", lambda name, figures: figures)
    assert command.main(["locks", "--json"]) == status
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [(f["name"], f["limit"], f["ok"]) for f in figures] == [
        ("a", 1.1, not status),
        ("b", None, True),
    ]
    assert command.main(["locks"]) == status
    table = capsys.readouterr().out
    assert ("MISSED" in table) is bool(status)
    assert max(map(len, table.splitlines())) <= 80
