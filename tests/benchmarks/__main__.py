"""The command ``python -m tests.benchmarks``."""

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import django

from tests.benchmarks.report import Figure, print_json, print_table, with_limits
from tests.servers import ServerPool

#: Modules of this package that are no benchmarks.
PARTS = {"__main__", "report"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks named; return 1 if a figure misses its limit."""
    options = parse(arguments)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    figures: list[Figure] = []
    with ServerPool() as servers:
        for name in options.names:
            benchmark = import_module(f"tests.benchmarks.{name}")
            measured = with_limits(name, benchmark.run(servers))
            figures += measured
            if not options.json:
                print_table(name, measured)
    if options.json:
        print_json(figures)
    return 0 if all(figure.ok for figure in figures) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    benchmarks = sorted(module.name for module in modules if module.name not in PARTS)
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument("names", metavar="NAME", nargs="+", choices=benchmarks)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
