"""Write the pages of figures from the files in docs/evidence."""

from pathlib import Path

from tests.evidence.files import FOLDER, ROOT, load
from tests.evidence.pages import evidence_part, performance_part

#: The generated part of a page begins after this line.
MARK = "<!-- From here on: python -m tests.evidence -->\n"

#: Each page, the kind of the files that it is made of, and the function that makes it.
PAGES = {"evidence": ("faults", evidence_part), "performance": ("benchmarks", performance_part)}


def main() -> None:
    """Write each page of which there are files."""
    for name, (kind, make) in PAGES.items():
        if files := load(kind, FOLDER):
            page = path_of(name)
            before, mark, _ = page.read_text("utf-8").partition(MARK)
            page.write_text(f"{before}{mark}\n{make(files)}", "utf-8")


def path_of(name: str) -> Path:
    """Return where a page is."""
    return ROOT / "docs" / "explanation" / f"{name}.md"


if __name__ == "__main__":
    main()
