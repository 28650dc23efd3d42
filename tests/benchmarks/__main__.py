"""The command ``python -m tests.benchmarks``."""

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

import django

from tests.benchmarks.report import Figure, print_table, with_limits
from tests.evidence.files import save
from tests.servers import ServerPool

#: Modules of this package that are no benchmarks.
PARTS = {"__main__", "procrastinate_peer", "report", "tools"}

#: The name that stands for all of them.
ALL = "all"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks named; return 1 if a figure misses its limit."""
    typed = sys.argv[1:] if arguments is None else arguments
    options = parse(typed)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    figures: dict[str, list[Figure]] = {}
    with ServerPool() as servers:
        for name in find_benchmarks() if ALL in options.names else options.names:
            benchmark = import_module(f"tests.benchmarks.{name}")
            figures[name] = with_limits(name, benchmark.run(servers))
            print_table(name, figures[name])
    if options.save:
        results = [
            {"benchmark": name, **asdict(one)} for name, some in figures.items() for one in some
        ]
        print(f"Saved in {save('benchmarks', typed, results)}.", file=sys.stderr)
    return 0 if all(figure.ok for measured in figures.values() for figure in measured) else 1


def find_benchmarks() -> list[str]:
    """Return the names of all benchmarks."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in modules if module.name not in PARTS)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    names = [ALL, *find_benchmarks()]
    parser.add_argument("names", metavar="NAME", nargs="+", choices=names)
    parser.add_argument("--save", action="store_true", help="write a file into docs/evidence")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
