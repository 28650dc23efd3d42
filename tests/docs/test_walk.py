"""Pages that take the reader through a whole project do so, from an empty folder."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.docs.pages import Page, pages
from tests.docs.walk import Walk, build_wheel
from tests.servers import RedisServer

#: Pages with commands that are to be run.
WALKS = [page for page in pages() if any(block.marker == "run" for block in page.blocks())]

#: A file, and a command with its output.
STORY = """
<!-- file: greeting.txt -->
```text
hello
```

<!-- run -->
```bash
cat greeting.txt && echo 27 times
```

<!-- prints -->
```text
31 times
```
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as it would be published."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize("page", WALKS, ids=lambda page: page.name)
def test_a_reader_gets_to_the_end(
    page: Page, tmp_path: Path, wheel: Path, redis_server: RedisServer
) -> None:
    """Every command of the page succeeds, and prints what the page says."""
    with RedisServer() as own:
        walk = Walk(tmp_path, wheel, f"{own.host}:{own.port}")
        with walk.reading(page):
            assert len(walk.printed) == sum(block.marker == "run" for block in page.blocks())


def test_a_page_is_done_as_it_says(tmp_path: Path) -> None:
    """Its files are written, its commands run; one that says what is not so is found."""
    page = Page(tmp_path / "page.md")
    for text in (STORY, STORY.replace("cat g", "cat no-g"), STORY.replace("31 times", "31 days")):
        page.path.write_text(text)
        walk = Walk(tmp_path, tmp_path / "no.whl", "127.0.0.1:1", patience=1)
        is_true = pytest.raises(AssertionError) if text != STORY else nullcontext()
        with is_true, walk.reading(Page(page.path)):
            assert walk.printed == ["hello\n27 times\n"]
