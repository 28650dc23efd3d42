"""A Chinese page and its English original have the same headings, code and neighbours."""

import re
from itertools import zip_longest
from os.path import relpath

import pytest

from tests.docs.pages import Page, translations

pytestmark = pytest.mark.nightly  # a translation need not follow in the same commit

every_translation = pytest.mark.parametrize(
    ("english", "chinese"), translations(), ids=lambda page: page.name
)

HAN = "[\u4e00-\u9fff]"
FULL_WIDTH = "，。：；！？、（）“”"
#: A part of a line of code that may be translated: a comment, or a string in quotes.
TRANSLATABLE = re.compile(rf'#(?=.*{HAN}).*$|"(?=[^"\n]*{HAN})[^"\n]*"')


@every_translation
def test_headings(english: Page, chinese: Page) -> None:
    """Both have the same number of headings, of the same levels in the same order."""
    assert chinese.levels() == english.levels(), (
        f"{chinese.name} and {english.name} differ in their headings: translate the change. "
        f"{chinese.headings()} {english.headings()}"
    )


@every_translation
def test_code(english: Page, chinese: Page) -> None:
    """Both show the same code; comments and strings may be in Chinese."""
    for ours, theirs in zip_longest(chinese.blocks(), english.blocks()):
        where = f"{chinese.name} and {english.name} differ in their code: "
        assert ours, f"{where}line {theirs.line} of {english.name} has a block more"
        assert theirs, f"{where}line {ours.line} of {chinese.name} has a block more"
        assert (ours.language, ours.marker) == (theirs.language, theirs.marker), where
        pairs = zip_longest(ours.code.splitlines(), theirs.code.splitlines(), fillvalue="")
        for number, (line, original) in enumerate(pairs):
            assert is_translation(line, original), (
                f"{where}line {ours.line + number} of {chinese.name} has {line!r}, "
                f"line {theirs.line + number} of {english.name} {original!r}"
            )


@pytest.mark.parametrize(
    ("line", "original", "expected"),
    [
        ("run(1)", "run(1)", True),
        ("run(1)  # 运行", "run(1)  # runs", True),
        ('run("工作", 1)', 'run("work", 1)', True),
        ('if a:  # 有 "甲"', 'if a:  # has an "a"', True),
        ('run("甲")  # 运行', 'run("a")  # runs', True),
        ("run(1)  # 运行", "run(2)  # runs", False),
        ("run(1)  # 运行", "run(1)", False),
        ('run("工作", 1)', 'run("work", 2)', False),
        ('run(f"工作 {a}")', 'run(f"work {b}")', False),
        ("run(1)  # other words", "run(1)  # runs", False),
        ("", "run(1)", False),
    ],
)
def test_code_is_compared(line: str, original: str, expected: bool) -> None:
    """A comment or a string is a translation only if all else of the line is the same."""
    assert is_translation(line, original) is expected


@every_translation
def test_links_between_languages(english: Page, chinese: Page) -> None:
    """Below its first heading a page links to the other language; elsewhere it keeps its own."""
    to_chinese = relpath(chinese.path, english.path.parent)
    to_english = relpath(english.path, chinese.path.parent)
    assert english.text.splitlines()[2] == f"[中文]({to_chinese})", english.name
    assert chinese.text.splitlines()[2] == f"[English]({to_english})", chinese.name
    translated = {ours.path: theirs.name for ours, theirs in translations()}
    for link in list(chinese.links())[1:]:
        path = (chinese.path.parent / link.partition("#")[0]).resolve()
        assert path not in translated, f"{chinese.name} links to {link}: use {translated[path]}"


@every_translation
def test_typography(english: Page, chinese: Page) -> None:
    """Chinese and Latin are apart by a space, and Chinese has punctuation of full width."""
    text = re.sub(r"^```.*?^```$|^<!--.*?-->$", "", chinese.text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "code", text)
    text = re.sub(r"(?<=\])\([^)\n]*\)", "", text)
    for what, pattern in {
        "no space between Chinese and Latin": rf"{HAN}[A-Za-z0-9]|[A-Za-z0-9]{HAN}",
        "a space beside full-width punctuation": rf" [{FULL_WIDTH}]|[{FULL_WIDTH}] [^|]",
        "half-width punctuation after Chinese": rf"{HAN}[,;:!?(.]",
    }.items():
        found = [line for line in text.splitlines() if re.search(pattern, line)]
        found = [line for line in found if not re.search(r"^\[.*\]\s*·", line)]
        assert found == [], f"{chinese.name}: {what}"


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
