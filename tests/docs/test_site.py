"""The site: it is built without a warning, and needs nothing from other hosts."""

import json
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import ROOT, Page, find_broken_link, pages
from tests.docs.walk import build_wheel

#: Elements whose addresses a browser loads by itself.
LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


class Loads(HTMLParser):
    """The addresses that a page loads when it is opened."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an address; that of a canonical page is not loaded."""
        values = dict(attrs)
        if values.get("rel") not in {"canonical", "next", "prev"}:
            self.found.append(values.get(LOADED.get(tag, "")) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.nightly
def test_every_page_is_in_the_site(site: Path) -> None:
    """Each page is there, and those at the top of the repository are too."""
    docs = [page.path.relative_to(ROOT / "docs") for page in pages() if "docs/" in page.name]
    expected = {str(path.with_suffix(".html")) for path in docs}
    expected |= {"overview.html", "changelog.html", "contributing.html"}
    built = {str(path.relative_to(site)) for path in site.rglob("*.html")}
    assert expected <= built


@pytest.mark.nightly
def test_links_of_the_site_lead_to_its_files(site: Path) -> None:
    """Links between docs/ and the top of the repository lead to pages of the site."""
    for path in (site / "index.html", site / "overview.html", site / "contributing.html"):
        links = re.findall(r'<a[^>]* href="([^"#:]+)(?:#[^"]*)?"', path.read_text("utf-8"))
        assert [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.nightly
def test_language_of_a_page(site: Path) -> None:
    """Chinese pages name their language, and have the theme's words in it."""
    for page, language, contents in [
        ("index.html", "en", "Table of contents"),
        ("zh/index.html", "zh", "目录"),
        ("tutorial.html", "en", "Table of contents"),
    ]:
        html = (site / page).read_text("utf-8")
        assert f'<html lang="{language}"' in html
        assert contents in html


@pytest.mark.nightly
def test_search_finds_words_of_chinese(site: Path) -> None:
    """The search gets the words of Chinese apart, which has no spaces between them."""
    index = json.loads((site / "search/search_index.json").read_text("utf-8"))
    (text,) = (
        part["text"] for part in index["docs"] if part["location"] == "zh/how-to/use-a-lock.html"
    )
    words = re.split(index["config"]["separator"], re.sub("<[^>]+>", " ", text))
    assert "任务" in words


@pytest.mark.nightly
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures are files of the site."""
    for path in site.rglob("*.html"):
        assert [url for url in Loads(path.read_text("utf-8")).found if "//" in url] == []
    for path in site.rglob("*.css"):
        assert re.findall(r"url\(\s*['\"]?(?:https?:)?//", path.read_text("utf-8")) == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_yaml_is_yaml(page: Page) -> None:
    """Files that a page shows for Docker Compose and Kubernetes can be read."""
    for block in page.blocks():
        if block.language == "yaml":
            assert all(yaml.safe_load_all(block.code))


def test_pictures_can_be_read_in_both_schemes() -> None:
    """Each picture is on a page; a drawn one has a title, a description, colours for the dark."""
    shown = {
        (page.path.parent / link).resolve()
        for page in pages()
        for link in page.links()
        if link.endswith((".svg", ".png")) and find_broken_link(page, link) is None
    }
    pictures = set((ROOT / "docs/pictures").iterdir())
    drawn = {picture for picture in pictures if picture.suffix == ".svg"}
    assert drawn
    assert pictures <= shown
    for picture in drawn:
        text = picture.read_text("utf-8")
        assert {"<title", "<desc", "prefers-color-scheme: dark"} <= set(
            re.findall(r"<title|<desc|prefers-color-scheme: dark", text)
        )


@pytest.mark.nightly
def test_the_page_of_the_package_has_no_relative_link(tmp_path: Path) -> None:
    """The README in the wheel, which PyPI shows, has whole addresses only."""
    with zipfile.ZipFile(build_wheel(tmp_path)) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = wheel.read(name).decode()
    assert "Description-Content-Type: text/markdown" in metadata
    assert "## The problem" in metadata
    code = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)]+)\)", code.sub("", metadata))
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
