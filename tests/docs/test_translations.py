"""A Chinese page and its English original have the same headings and the same code."""

import re
from itertools import zip_longest

import pytest

from tests.docs.pages import translations

pytestmark = pytest.mark.nightly  # a translation need not follow in the same commit


def test_headings() -> None:
    """Both have the same number of headings, of the same levels in the same order."""
    faults = [
        f"{chinese.name} and {english.name} differ in their headings: translate the change."
        for english, chinese in translations()
        if chinese.levels() != english.levels()
    ]
    assert faults == []


def test_code() -> None:
    """Both show the same code; comments and strings may be in Chinese."""
    faults = []
    for english, chinese in translations():
        lines = [
            [
                constant(line)
                for block in each.blocks()
                for line in (block.marker, *block.code.splitlines())
            ]
            for each in (chinese, english)
        ]
        faults += [
            f"{chinese.name} has {line!r}, {english.name} {original!r}"
            for line, original in zip_longest(*lines, fillvalue="")
            if line != original
        ]
    assert faults == []


def constant(line: str) -> str:
    """Return a line of code without its comments and strings, but with the fields of those."""
    return re.sub(r'#.*$|"[^"\n]*"', lambda found: str(re.findall(r"\{.*?\}", found[0])), line)
