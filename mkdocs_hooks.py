"""
The site's menu, and the pages at the top of the repository, which are not in docs/.

Used by mkdocs.yml. The pages stay as they are readable in a checkout, where links lead from
docs/ to README.md and back; here they lead to the copies of these pages in the site.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

#: Pages at the top of the repository, and their names in the site. README.md would be taken
#: for the index of its folder.
TOP_PAGES = {
    "README.md": "overview.md",
    "README.zh.md": "zh/overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "LICENSE": "license.txt",
}
#: Inside of a link's brackets, or of a definition such as ``[guide]: guide.md``.
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the menu of what docs/index.md lists, so that there is one list of the pages."""
    config.nav = [{"Home": "index.md"}, *_menu(config, "index.md")]
    if (Path(config.docs_dir) / "zh/index.md").is_file():
        chinese: list[Any] = ["zh/index.md", *_menu(config, "zh/index.md", within="zh/")]
        config.nav.append({"中文": chinese})
    return config


def _menu(config: MkDocsConfig, index: str, within: str = "") -> Iterator[Any]:
    """Yield a part of the menu for each heading of an index that has a list of pages below."""
    text = (Path(config.docs_dir) / index).read_text("utf-8")
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        heading = section.partition("\n")[0]
        links = re.findall(r"^- \[(.*?)\]\(([^)#]+)\)", section, flags=re.MULTILINE)
        listed = [(title, _name_in_site(link, f"docs/{index}")) for title, link in links]
        pages = [
            {title: name} if name in TOP_PAGES.values() else name
            for title, name in listed
            if name.startswith(within)
        ]
        if pages:
            yield {heading: pages}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository."""
    top = Path(config.docs_dir).parent
    for name, name_in_site in TOP_PAGES.items():
        if (top / name).is_file():
            files.append(File.generated(config, name_in_site, abs_src_path=str(top / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to where their pages are in the site."""
    source = {name: top for top, name in TOP_PAGES.items()}.get(page.file.src_uri)
    name = source or f"docs/{page.file.src_uri}"
    depth = page.file.src_uri.count("/")

    def replace(found: re.Match[str]) -> str:
        link, hash_sign, anchor = found[0].partition("#")
        if not link or "://" in link or link.startswith("mailto:"):
            return found[0]
        return "../" * depth + _name_in_site(link, name) + hash_sign + anchor

    return LINK.sub(replace, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Join the lines of Chinese paragraphs, of which a browser makes a space otherwise."""
    if not page.file.src_uri.startswith("zh/"):
        return html
    parts = re.split(r"(<pre.*?</pre>)", html, flags=re.DOTALL)
    parts[::2] = (re.sub("(?<=[。！？：；，])\n", "", part) for part in parts[::2])
    return "".join(parts)


def on_page_context(context: Any, page: Page, config: MkDocsConfig, nav: Any) -> Any:
    """Have a Chinese page say so to browsers, and have the theme's own words in Chinese there."""
    config.theme["language"] = "zh" if page.file.src_uri.startswith("zh/") else "en"
    return context


def _name_in_site(link: str, source: str) -> str:
    """Return the page of the site to which a link of a page of the repository leads."""
    parts: list[str] = source.split("/")[:-1]
    for part in link.split("/"):
        if part == ".." and parts:
            parts.pop()
        elif part != ".":
            parts.append(part)
    path = "/".join(parts)
    return TOP_PAGES.get(path, path.removeprefix("docs/"))
