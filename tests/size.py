"""
Weighs the project: lines of code, and words of docs, beside limits that may only fall.

``python -m tests.size`` prints each part with its size and limit, and ends with 1 if a part is
larger than its limit. A line of code is a line that holds a token of Python which is not a
comment or a docstring, or a line of SQL that is not blank or a comment.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parent.parent

_NOT_CODE: Final = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


class Part(NamedTuple):
    """A part of the project and its limit."""

    name: str
    unit: str
    limit: int
    measure: Callable[[], int]


def count_code(source: str) -> int:
    """Return the lines of code of a Python source."""
    docstrings = set(_find_docstrings(ast.parse(source)))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def count_sql(source: str) -> int:
    """Return the lines of an SQL text that are neither blank nor a comment."""
    lines = map(str.strip, source.splitlines())
    return sum(1 for line in lines if line and not line.startswith("--"))


def count_words(source: str) -> int:
    """Return the words of a Markdown page, code and tables included."""
    return len(re.findall(r"\S+", source))


def _find_docstrings(tree: ast.AST) -> Iterator[tuple[int, int]]:
    """Yield where each docstring begins: line and column."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if not isinstance(node, documented) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield first.lineno, first.col_offset


def sum_code(*folders: str) -> int:
    """Return the lines of code of all Python and SQL files in folders, or of single files."""
    return sum(_count_file(path) for path in _iter_files(folders, {".py", ".sql"}))


def read_pages() -> list[str]:
    """Return the English pages of docs/ but those that a command makes for a release."""
    docs = ROOT / "docs"
    made = {docs / "explanation/evidence.md", docs / "explanation/performance.md"}
    pages = (path for path in docs.rglob("*.md") if not path.is_relative_to(docs / "zh"))
    return [path.read_text() for path in pages if path not in made]


def _count_file(path: Path) -> int:
    count = count_sql if path.suffix == ".sql" else count_code
    return count(path.read_text())


def _iter_files(names: Iterable[str], suffixes: set[str]) -> Iterator[Path]:
    for name in names:
        place = ROOT / name
        found = [place] if place.is_file() else sorted(place.rglob("*"))
        hidden = ("__pycache__", "migrations")
        yield from (
            path for path in found if path.suffix in suffixes and not {*path.parts} & {*hidden}
        )


#: What each part weighs at most. A change may lower a limit; only a new promise raises one, and
#: its commit says so.
PARTS: Final = (
    Part(
        "package",
        "lines",
        12_206,
        lambda: sum_code("django_celery_safe", "pytest_django_celery_safe.py"),
    ),
    Part("tests", "lines", 29_658, lambda: sum_code("tests")),
    Part("example", "lines", 1_408, lambda: sum_code("example_project")),
    Part("docs", "words", 31_559, lambda: sum(map(count_words, read_pages()))),
    Part("docs", "pages", 27, lambda: len(read_pages())),
)


def main() -> int:
    """Print the size of each part; return 1 if one is beyond its limit."""
    sizes = [(part, part.measure()) for part in PARTS]
    for part, size in sizes:
        mark = "" if size <= part.limit else "  TOO LARGE"
        print(f"{part.name:<10}{size:>8,} of {part.limit:>8,} {part.unit}{mark}")
    return int(any(size > part.limit for part, size in sizes))


if __name__ == "__main__":
    sys.exit(main())
