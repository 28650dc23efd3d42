"""Pages that take the reader through a whole project do so, from an empty folder."""

from pathlib import Path

import pytest

from tests.docs.pages import Page, pages
from tests.docs.walk import Walk, build_wheel
from tests.servers import RedisServer

#: Pages with commands that are to be run.
WALKS = [page for page in pages() if any(block.marker == "run" for block in page.blocks())]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it would be published."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", WALKS, ids=lambda page: page.name)
def test_a_reader_gets_to_the_end(page: Page, tmp_path: Path, wheel: Path) -> None:
    """Every command of the page succeeds, and prints what the page says."""
    with RedisServer() as own:
        walk = Walk(tmp_path, wheel, f"{own.host}:{own.port}")
        walk.read(page)
    assert len(walk.printed) == sum(block.marker == "run" for block in page.blocks())
