"""The pages of figures say what the files of past runs say."""

import pytest

from tests.evidence.__main__ import MARK, PAGES, path_of
from tests.evidence.files import FOLDER, load

pytestmark = [pytest.mark.nightly, pytest.mark.repository]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_the_files(name: str) -> None:
    """``python -m tests.evidence`` was run since the last file was saved."""
    kind, make = PAGES[name]
    text = path_of(name).read_text("utf-8")
    assert text.partition(MARK)[2] == f"\n{make(load(kind, FOLDER))}"
