"""Pages that take the reader through a whole project do so, from an empty folder."""

from pathlib import Path

import pytest

from tests.docs.pages import Page, pages
from tests.docs.walk import PATIENCE, Walk, build_wheel
from tests.servers import RedisServer

#: Pages with commands that are to be run.
WALKS = [page for page in pages() if any(block.marker == "run" for block in page.blocks())]

#: A file, a command with its output, and a process that runs meanwhile.
STORY = """
<!-- file: greeting.txt -->
```text
hello
```

<!-- run -->
```bash
cat greeting.txt && echo 27 times
```

It prints `hello`.

<!-- prints -->
```text
31 times
```

<!-- background: server -->
```bash
sh -c 'echo ready; exec sleep 60'
```

It logs `ready`.
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
    walk = read(tmp_path / "right", STORY)
    assert walk.printed == ["hello\n27 times\n"]
    assert not walk.background["server"].running
    for true, false, error in [
        ("cat greeting.txt", "cat farewell.txt", AssertionError),
        ("31 times", "31 days", AssertionError),
        ("logs `ready`", "logs `done`", TimeoutError),
    ]:
        with pytest.raises(error):
            read(tmp_path / false, STORY.replace(true, false), patience=1)


def read(folder: Path, text: str, patience: float = PATIENCE) -> Walk:
    """Walk through a page that needs neither the package nor a server."""
    folder.mkdir()
    page = folder / "page.md"
    page.write_text(text)
    walk = Walk(folder, folder / "no.whl", "127.0.0.1:1", patience)
    with walk.reading(Page(page)):
        pass
    return walk
