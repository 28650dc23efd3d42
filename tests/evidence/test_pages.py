"""The pages of figures say what the files of past runs say."""

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.growth import RELAYS, SIZES
from tests.benchmarks.stages import GROWTH
from tests.evidence.__main__ import MARK, PAGES, path_of
from tests.evidence.files import FOLDER, Evidence, load
from tests.evidence.pages import evidence_part, performance_part
from tests.evidence.plots import draw_all

pytestmark = pytest.mark.nightly

VERSIONS = {"Python": "3.11.7", "Redis": "7.0.15"}


def made_by(kind: str, *results: Any) -> Evidence:
    """Return a file of these results."""
    return Evidence(kind, f"python -m tests.{kind} all", "2026-11-23", VERSIONS, "2", results)


def carried(seed: int, **changes: Any) -> dict[str, Any]:
    """Return the result of a run of carried tasks, with changes."""
    measured = {"of all": [0.5, 2.5], "by an idle worker": []}
    planned = {"scenario": "carried", "--seed": seed, "--broker": "redis", "--broken": "nothing"}
    return {
        **planned,
        "tasks": 2000,
        "wait, p99": 2.5,
        "violations": 0,
        "measured": measured,
    } | changes


def figure(name: str, value: float, **changes: Any) -> dict[str, Any]:
    """Return a figure of a benchmark."""
    return {
        "benchmark": "growth",
        "name": name,
        "value": value,
        "limit": None,
        "note": "",
    } | changes


FAULTS = [
    made_by("faults", carried(1), carried(1, found=True, **{"--broken": "new-id"})),
    made_by("faults", carried(2, violations=3), carried(2, found=False, **{"--broken": "new-id"})),
]
BENCHMARKS = [
    made_by(
        "benchmarks",
        *(
            figure(f"{kind}: {SIZES[0]:,}, µs", 100.0)
            for kind in ("lock, Redis", "lock, table", "first run")
        ),
        *(
            figure(f"{kind}: {size:,} / {SIZES[0]:,}", ratio)
            for kind in ("lock, Redis", "lock, table", "first run")
            for size in SIZES[1:]
        ),
        *(figure(f"{number} relays: messages/s", 900.0 * number) for number in RELAYS),
        *(figure(f"1 stage x {size:,} steps, s", size / 400) for size in GROWTH),
    )
    for ratio in (1.0, 1.5, 1.25)
]


def test_the_page_of_evidence_has_each_seed_and_each_fault() -> None:
    """Each seed has a column of its figures; a missed fault is visible."""
    text = evidence_part(FAULTS)
    assert "2 runs without a deliberate fault: **3 broken promises**." in text
    assert "wait, p99" not in text
    assert "### `carried --broker redis`\n\n| | seed 1 | seed 2 |" in text
    assert "| tasks | 2,000 | 2,000 |" in text
    assert "| violations | 0 | 3 |" in text
    assert "| kills | p50 | p95 | p99 | max |" in text
    assert (
        "| of all | 4 | 2.50 | 2.50 | 2.50 | 2.50 |\n| by an idle worker | 0 |  |  |  |  |" in text
    )
    assert "| carried | `new-id` | 1 of 2 runs |" in text
    assert "| 2026-11-23 | `python -m tests.faults all` | Python 3.11.7, Redis 7.0.15 | 2 |" in text


def test_a_run_that_proves_too_little_breaks_no_promise() -> None:
    """The page says which check had too little to look at, and with which seed."""
    scarce = ["runs again: 0, and 1 are wanted."]
    text = evidence_part([made_by("faults", carried(5, violations=1, scarce=scarce))])
    assert "1 runs without a deliberate fault: **0 broken promises**." in text
    assert "- `carried --broker redis`, seed 5: runs again: 0, and 1 are wanted." in text
    assert "| violations | 1 |" in text
    assert "| scarce |" not in text


def test_a_run_that_could_not_be_done_is_no_good_one() -> None:
    """It counts as a broken promise, and its figures are missed."""
    failed = {**carried(1), "error": "TimeoutError()"}
    del failed["violations"], failed["tasks"], failed["measured"]
    fault = {"--broken": "new-id"}
    text = evidence_part(
        [
            made_by("faults", failed, failed | fault),
            made_by("faults", carried(2), carried(2, found=True, **fault)),
        ]
    )
    assert "**1 broken promises**" in text
    assert "| tasks | not done | 2,000 |" in text
    assert "| carried | `new-id` | 1 of 1 runs; 1 could not be done |" in text


def test_the_page_of_figures_has_medians_and_limits() -> None:
    """The median of all files, the least and the most, and the limit of the last one."""
    files = [
        made_by("benchmarks", figure("ours / raw", value, limit=1.1, note="ours"))
        for value in (1.04, 1.09, 1.05)
    ]
    assert "| ours / raw | 1.05 | 1.04 to 1.09 | 1.10 | ours |" in performance_part(files)


def test_the_page_of_figures_shows_a_limit_that_is_missed() -> None:
    """The limit has a word beside it, whichever way is better."""
    slow = made_by("benchmarks", figure("ours / raw", 1.2, limit=1.1))
    rare = made_by("benchmarks", figure("messages/s", 9.0, limit=10.0, better="higher"))
    assert "| ours / raw | 1.20 | 1.20 to 1.20 | 1.10, missed |" in performance_part([slow])
    assert "| messages/s | 9 | 9 to 9 | 10, missed |" in performance_part([rare])


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    """Each picture has its words as text; without figures it is not drawn."""
    draw_all([], [], tmp_path)
    assert list(tmp_path.iterdir()) == []
    draw_all(FAULTS, BENCHMARKS, tmp_path)
    words = {
        "growth.svg": "lock, Redis",
        "relays.svg": "messages a second",
        "stage-time.svg": "s of a run",
        "recovery.svg": "redis, 4 kills",
    }
    assert {path.name for path in tmp_path.iterdir()} == set(words)
    for name, word in words.items():
        text = (tmp_path / name).read_text("utf-8")
        assert word in text
        assert text.count("<desc>") == text.count("prefers-color-scheme: dark") == 1


@pytest.mark.repository
def test_the_pages_are_made_of_the_files() -> None:
    """``python -m tests.evidence`` was run since the last file was saved."""
    there = {name for name, (kind, _) in PAGES.items() if load(kind, FOLDER)}
    assert "evidence" in there
    assert there == {name for name in PAGES if path_of(name).exists()}
    for name in there:
        kind, make = PAGES[name]
        text = path_of(name).read_text("utf-8")
        assert text.partition(MARK)[2] == f"\n{make(load(kind, FOLDER))}"
