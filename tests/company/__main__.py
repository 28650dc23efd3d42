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


def main(names: list[str]) -> int:
    """Play beside each neighbour and print the table; return whether something went wrong."""
    results: dict[str, dict[str, str | None]] = {}
    with ServerPool() as servers, tempfile.TemporaryDirectory() as folder:
        databases = Databases(servers, Path(folder))
        for number, name in enumerate(names):
            (place := Path(folder) / str(number)).mkdir()
            try:
                results[name] = play(name, databases, place)
            except NotInstalled as error:
                print(f"not played: {name}, without {error}", file=sys.stderr)
    print(f"Played on {datetime.now(UTC):%Y-%m-%d}, with Django {django.__version__}.\n")
    print("| beside | flows that work |\n|---|---|")
    for name, found in results.items():
        wrong = [flow for flow, why in found.items() if why]
        work = f"all but {', '.join(wrong)}" if wrong else "all"
        print(f"| {' '.join((name, versions(name))).strip()} | {work} |")
        for flow in wrong:
            print(f"{name}, {flow}: {found[flow]}", file=sys.stderr)
    return int(any(why for found in results.values() for why in found.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(NEIGHBOURS)))
