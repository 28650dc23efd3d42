"""Prints the table of docs/reference/works-with.md: ``python -m tests.company [NEIGHBOUR …]``."""

import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from tests.company.matrix import NotInstalled, play, versions  # noqa: E402
from tests.company.neighbours import NEIGHBOURS  # noqa: E402
from tests.servers import ServerPool  # noqa: E402
from tests.servers.databases import Databases  # noqa: E402

#: How a cell looks: all is well, or not, or not played.
WELL, BROKEN, NOT_PLAYED = "✓", "✗", "-"


def cell(verdicts: list[str | None]) -> str:
    """Return how the cell of a column looks."""
    if not verdicts:
        return NOT_PLAYED
    return BROKEN if any(verdicts) else WELL


def main(names: list[str]) -> int:
    """Play beside each neighbour and print the table; return whether something went wrong."""
    results: dict[str, dict[str, str | None]] = {}
    with ServerPool() as servers, tempfile.TemporaryDirectory() as folder:
        databases = Databases(servers, Path(folder))
        for number, name in enumerate(names):
            place = Path(folder) / str(number)
            place.mkdir()
            try:
                results[name] = play(name, databases, place)
            except NotInstalled as error:
                print(f"not played: {name}, without {error}", file=sys.stderr)
            for flow, wrong in results.get(name, {}).items():
                if wrong:
                    print(f"{name}, {flow}: {wrong}", file=sys.stderr)
    print(f"Played on {datetime.now(UTC):%Y-%m-%d}, with Django {django.__version__}.\n")
    flows = list(dict.fromkeys(flow for found in results.values() for flow in found))
    own = {flow for here in NEIGHBOURS.values() for flow in here.more}
    columns = [[flow] for flow in flows if flow not in own]
    columns.append([flow for flow in flows if flow in own])
    headings = [*(flow for (flow,) in columns[:-1]), "its own"]
    print("| beside |", " | ".join(headings), "|")
    print("|---" * (len(columns) + 1) + "|")
    for name, found in results.items():
        cells = " | ".join(
            cell([found[flow] for flow in each if flow in found]) for each in columns
        )
        print(f"| {' '.join((name, versions(name))).strip()} | {cells} |")
    return int(any(wrong for found in results.values() for wrong in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(NEIGHBOURS)))
