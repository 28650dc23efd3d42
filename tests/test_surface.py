"""The reference explains each public name, and no other."""

import re
from itertools import chain

import pytest

from tests.docs.pages import page, pages
from tests.surface import main, read_surface

pytestmark = pytest.mark.repository

#: Pages on which each heading of the second level is a public name, but for one.
NAMES = ("api", "commands", "settings")
LISTS = [page(f"docs/reference/{name}.md") for name in NAMES]
EVERYTHING = "\n".join(each.text for each in pages() if each.name.startswith("docs/reference/"))


def test_no_kind_has_grown() -> None:
    """There are no more names than the limits allow."""
    assert main() == 0


def test_the_reference_has_each_name() -> None:
    """Options, actions and flags are named in the section of what they belong to."""
    missing = []
    for name in chain(*read_surface().values()):
        owner, word = re.split(r"[ .]", name)[0], name.split(" ")[-1]
        sections = (each.section(owner) for each in LISTS if owner in each.headings(2))
        text = next(sections, EVERYTHING) if " " in name else EVERYTHING
        missing += [] if re.search(rf"(?<![\w-]){word}(?![\w-])", text) else [name]
    assert missing == []


def test_the_reference_lists_no_other() -> None:
    """No heading has a name that is gone."""
    known = set(re.split(r"[ .]", " ".join(chain(*read_surface().values()))))
    listed = {heading for each in LISTS for heading in [*each.headings(2), *each.headings(3)]}
    assert listed - known == {"System checks"}
