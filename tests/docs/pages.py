"""Reading the documentation: headings, links, tables and code blocks of Markdown pages."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent.parent

_MARKDOWN = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    language: str
    code: str
    #: Number of its first line in the page, from 1.
    line: int
    #: The text of the comment right above it, such as ``runnable``.
    marker: str


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    @property
    def name(self) -> str:
        """Its path from the root of the repository."""
        return str(self.path.relative_to(ROOT))

    @property
    def is_chinese(self) -> bool:
        """Whether it is the Chinese version of a page."""
        return self.name == "README.zh.md" or self.name.startswith("docs/zh/")

    @cached_property
    def text(self) -> str:
        """Its text."""
        return self.path.read_text("utf-8")

    @cached_property
    def tokens(self) -> list[Token]:
        """Its parts, as the parser names them."""
        return _MARKDOWN.parse(self.text)

    def headings(self, level: int | None = None) -> list[str]:
        """Return the headings of that level, or all, as plain text."""
        return [
            "".join(child.content for child in self.tokens[index + 1].children or ())
            for index, token in enumerate(self.tokens)
            if token.type == "heading_open" and level in (None, int(token.tag[1]))
        ]

    def levels(self) -> list[str]:
        """Return the level of each heading, such as ``h2``."""
        return [token.tag for token in self.tokens if token.type == "heading_open"]

    @cached_property
    def anchors(self) -> set[str]:
        """The anchors of all headings, made as GitHub makes them."""
        anchors: dict[str, int] = {}
        for heading in self.headings():
            anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            anchors[anchor] = anchors.get(anchor, -1) + 1
        return {
            anchor if not number else f"{anchor}-{number}"
            for anchor, last in anchors.items()
            for number in range(last + 1)
        }

    def links(self) -> Iterator[str]:
        """Yield the target of every link and image."""
        for token in self.tokens:
            for child in token.children or ():
                if child.type in {"link_open", "image"}:
                    yield str(child.attrs.get("href") or child.attrs.get("src"))

    def blocks(self) -> Iterator[Block]:
        """Yield the fenced blocks."""
        marker = ""
        for token in self.tokens:
            if token.type == "fence" and token.map is not None:
                yield Block(token.info, token.content, token.map[0] + 2, marker)
            found = re.fullmatch(r"<!-- (.+) -->\s*", token.content)
            marker = found[1] if token.type == "html_block" and found else ""

    def section(self, heading: str) -> str:
        """Return the text below a heading, up to the next one of the same or a higher level."""
        found = re.search(rf"^(#+) {re.escape(heading)}\n(.*)", self.text, re.DOTALL | re.MULTILINE)
        assert found is not None, f"{self.name} has no heading {heading!r}"
        return re.split(rf"^#{{1,{len(found[1])}}} ", found[2], maxsplit=1, flags=re.MULTILINE)[0]

    def rows(self, heading: str | None = None) -> list[list[str]]:
        """Return the cells of the first table, of the page or below a heading, without its head."""
        text = self.text if heading is None else self.section(heading)
        rows: list[list[str]] = []
        for token in _MARKDOWN.parse(text):
            if token.type == "tbody_close":
                break
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline" and rows:
                rows[-1].append(token.content)
        return rows[1:]


@cache
def pages() -> list[Page]:
    """Return every page: those at the root, and those of docs/."""
    top = ("README", "README.zh", "CHANGELOG", "CONTRIBUTING", "SECURITY")
    names = [*(f"{name}.md" for name in top), "llms.txt"]
    docs = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
    return [page(name) for name in (*names, *docs)]


def translations() -> list[tuple[Page, Page]]:
    """Return each page that has a Chinese version, with that version."""
    chinese = [each for each in pages() if each.is_chinese]
    return [(page(each.name.replace("/zh/", "/").replace(".zh.", ".")), each) for each in chinese]


@cache
def page(name: str) -> Page:
    """Return one page by its path from the root of the repository."""
    return Page(ROOT / name)


def find_broken_link(source: Page, link: str) -> str | None:
    """Return the fault of a relative link; None: it is correct."""
    parts = urlsplit(link)
    if parts.scheme:
        return None
    path = (source.path.parent / unquote(parts.path)).resolve() if parts.path else source.path
    if not path.is_file():
        return f"{source.name} links to {link}, which is no file"
    if parts.fragment and unquote(parts.fragment) not in page(str(path.relative_to(ROOT))).anchors:
        return f"{source.name} links to {link}, which has no such heading"
    return None


def names_in(cell: str) -> list[str]:
    """Return what stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)
