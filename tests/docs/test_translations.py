"""A Chinese page and its English original have the same headings and the same code."""

import re
from itertools import zip_longest

import pytest

from tests.docs.pages import translations

pytestmark = pytest.mark.nightly  # a translation need not follow in the same commit

HAN = "[\u4e00-\u9fff]"
#: A part of a line of code that may be translated: a comment, or a string in quotes.
TRANSLATABLE = re.compile(rf'#(?=.*{HAN}).*$|"(?=[^"\n]*{HAN})[^"\n]*"')


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
    assert is_translation('run("工作", 1)  # 运行', 'run("work", 1)  # runs')
    assert not is_translation('run(f"工作 {a}")', 'run(f"work {b}")')
    faults = []
    for english, chinese in translations():
        lines = [
            [line for block in each.blocks() for line in (block.marker, *block.code.splitlines())]
            for each in (chinese, english)
        ]
        faults += [
            f"{chinese.name} has {line!r}, {english.name} {original!r}"
            for line, original in zip_longest(*lines, fillvalue="")
            if not is_translation(line, original)
        ]
    assert faults == []


def is_translation(line: str, original: str) -> bool:
    """Tell whether a line of code is the original, comments and strings of people apart."""
    pattern, end = "", 0
    for found in TRANSLATABLE.finditer(line):
        pattern += re.escape(line[end : found.start()])
        pattern += "#.+" if found[0].startswith("#") else quoted(found[0])
        end = found.end()
    return re.fullmatch(pattern + re.escape(line[end:]), original) is not None


def quoted(text: str) -> str:
    """Return a pattern of a string with the same fields in braces, in the same order."""
    fields = re.findall(r"\{[^}]*\}", text)
    return '"' + "".join(f'[^"{{]*{re.escape(field)}' for field in fields) + '[^"{]*"'
