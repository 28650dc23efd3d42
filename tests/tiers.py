"""
The tests that a run leaves out unless it asks for them: the nightly ones, and the quarantine.

``-m`` with one of the marks in ``LEFT_OUT`` asks for them, and so does the name of a test
(``file.py::test_name``). What is left out is counted in the last lines of the run.
"""

import re
from collections import Counter
from datetime import date
from pathlib import Path

import pytest

#: Marks whose tests only run if they are asked for.
LEFT_OUT = ("quarantine", "nightly")

_LEFT_OUT = pytest.StashKey[Counter[str]]()


def start_counting(config: pytest.Config) -> None:
    """Count the tests that this run leaves out."""
    config.stash[_LEFT_OUT] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests with a mark of ``LEFT_OUT``, unless ``-m`` or a node id names them."""
    asked_for = set(re.findall(r"\w+", config.option.markexpr))
    named = [argument for argument in config.args if "::" in argument]
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        _check_quarantine(item)
        marks = [mark for mark in LEFT_OUT if item.get_closest_marker(mark)]
        if marks and asked_for.isdisjoint(marks) and not _is_named(item, named):
            config.stash[_LEFT_OUT][marks[0]] += 1
            deselected.append(item)
        else:
            kept.append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


def _is_named(item: pytest.Item, named: list[str]) -> bool:
    """Return whether a node id of the command line is this test's, or that of its function."""
    name = _without_folder(item.nodeid)
    return any(name.startswith(_without_folder(argument)) for argument in named)


def _without_folder(nodeid: str) -> str:
    path, _, name = nodeid.partition("::")
    return f"{Path(path).name}::{name}"


def _check_quarantine(item: pytest.Item) -> None:
    """Refuse a mark ``quarantine`` that does not say since when and why."""
    for mark in item.iter_markers("quarantine"):
        try:
            since, reason = mark.args
            date.fromisoformat(since)
            is_complete = not mark.kwargs and bool(reason.strip())
        except (TypeError, ValueError, AttributeError):
            is_complete = False
        if not is_complete:
            raise pytest.UsageError(
                f'{item.nodeid}: write quarantine("2026-11-26", "why it can fail"), '
                f"not quarantine{mark.args}."
            )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have a process of pytest-xdist report its count to the one that prints."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[_LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    """Take the count of a process of pytest-xdist: each has collected the same tests."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[_LEFT_OUT] |= Counter(output.get("left_out", {}))  # type: ignore[attr-defined]


def write_left_out(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were left out, and how to run them."""
    for mark, number in terminalreporter.config.stash[_LEFT_OUT].items():
        plural = "" if number == 1 else "s"
        terminalreporter.write_line(f"left out: {number} {mark} test{plural} (-m {mark} runs them)")
