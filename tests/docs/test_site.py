"""The site is built without a warning, and needs nothing from other hosts."""

import re
from pathlib import Path

import pytest
import yaml

from tests.commands import run_python
from tests.docs.pages import ROOT, pages

#: An element that a browser loads by itself from another host.
LOADED = re.compile(
    r"<(?:script|img|iframe|source|link rel=\"?(?:stylesheet|icon))\b[^>]*"
    r"(?:src|href)=\"?(?:https?:)?//[^>]*>"
)


@pytest.mark.nightly
def test_the_site(tmp_path: Path) -> None:
    """It has each page, with warnings as errors, and none loads anything from elsewhere."""
    run_python("-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path), cwd=ROOT)
    docs = [page.path.relative_to(ROOT / "docs") for page in pages() if "docs/" in page.name]
    expected = {str(path.with_suffix(".html")) for path in docs}
    expected |= {"overview.html", "changelog.html", "contributing.html"}
    assert expected <= {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html")}
    for path in tmp_path.rglob("*.html"):
        assert LOADED.findall(path.read_text("utf-8")) == []


def test_yaml_is_yaml() -> None:
    """Files that pages show for Docker Compose and Kubernetes can be read."""
    shown = [block for page in pages() for block in page.blocks() if block.language == "yaml"]
    assert shown
    for block in shown:
        assert all(yaml.safe_load_all(block.code)), block
