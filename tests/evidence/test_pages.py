"""The pages of figures say what the files of past runs say."""

from pathlib import Path

import pytest

from tests.evidence.__main__ import MARK, PAGES, path_of
from tests.evidence.files import FOLDER, load
from tests.evidence.plots import draw_all

pytestmark = [pytest.mark.nightly, pytest.mark.repository]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_the_files(name: str) -> None:
    """``python -m tests.evidence`` was run since the last file was saved."""
    kind, make = PAGES[name]
    text = path_of(name).read_text("utf-8")
    assert text.partition(MARK)[2] == f"\n{make(load(kind, FOLDER))}"


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    """Without figures no picture is drawn; each one has its words as text."""
    draw_all([], [], tmp_path)
    assert not list(tmp_path.iterdir())
    draw_all(load("faults", FOLDER), load("benchmarks", FOLDER), tmp_path)
    texts = {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()}
    assert texts.keys() == {"growth.svg", "relays.svg", "stage-time.svg", "recovery.svg"}
    assert all(text.count("<desc>Lines: ") == 1 for text in texts.values())
