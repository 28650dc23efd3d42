"""
Applies each mutation to a copy of the project and runs the tests of its room.

A mutation is caught if a test fails that passes without it. ``outcomes.txt`` has what became of
each: the test that caught it, which is tried first the next time, or ``SURVIVED``. ``python -m
tests.mutations`` ends with 1 if a mutation survives that did not before. ``--room`` and
``--match`` choose some of them; ``--check`` only applies them; ``--save`` writes the file.
"""

import argparse
import ast
import os
import queue
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from . import TESTS, Mutation, read
from .faults import FAULTS

MUTATIONS: Final = read(FAULTS)
ROOT: Final = Path(__file__).parent.parent.parent
PACKAGE: Final = "django_celery_safe"
OUTCOMES: Final = Path(__file__).with_name("outcomes.txt")
SURVIVED: Final = "SURVIVED"
#: Longest run of tests, s. A fault that makes a test hang is caught, too.
LONGEST: Final = 1800
#: What a landing runs, the cheapest first.
RUNS: Final = (["-m", "not long"], ["-m", "sql", "--db", "postgres"], ["-m", "long"])
#: How many times a test must have failed in the run of its room, if it passes alone.
TIMES: Final = 2


def main() -> int:
    """Run the chosen mutations; return 1 if one survives that did not before."""
    options = _parse()
    chosen = [
        (room, one)
        for room in options.room or MUTATIONS
        for one in MUTATIONS[room]
        if options.match in f"{one.where} {one.breaks}"
    ]
    if options.check:
        for _, one in chosen:
            changed = one.apply((ROOT / PACKAGE / one.path).read_text())
            ast.parse(changed if one.path.suffix == ".py" else "")
        print(f"{len(chosen)} mutations can be applied")
        return 0
    known = dict(line.split("\t") for line in OUTCOMES.read_text().splitlines())
    with TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        lab = Lab(Path(folder), options)
        found = dict(pool.map(lambda chosen: lab.judge(*chosen, known), chosen))
    if options.save:
        lines = [f"{name}\t{outcome}\n" for name, outcome in {**known, **found}.items()]
        OUTCOMES.write_text("".join(sorted(lines)))
    survivors = [name for name, outcome in found.items() if outcome == SURVIVED]
    new = [name for name in survivors if known.get(name) != SURVIVED]
    print(f"{len(chosen)} mutations, {len(survivors)} survived, {len(new)} of them new")
    for name in survivors:
        print(f"{'NEW ' if name in new else '    '}{name}")
    return int(bool(new))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--room", action="append", choices=MUTATIONS, help="may be repeated")
    parser.add_argument("--match", default="", help="a part of a place or of what it breaks")
    parser.add_argument("--check", action="store_true", help="apply them, and run no test")
    parser.add_argument("--save", action="store_true", help="write outcomes.txt")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at a time; 1 by default")
    parser.add_argument("-n", "--processes", default="2", help="as for pytest; 2 by default")
    return parser.parse_args()


class Lab:
    """Copies of the project, one for each mutation that is tried at the same time."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.side_by_side = ["-n", options.processes, "--dist", "worksteal"]
        self.copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(options.jobs):
            self.copies.put(_copy_project(folder / str(number)))
        self.whole = _copy_project(folder / "whole")
        self.passes = cache(lambda test: not self._run(self.whole, [test]))

    def judge(self, room: str, one: Mutation, known: dict[str, str]) -> tuple[str, str]:
        """Return the name of a mutation, and the test that catches it or ``SURVIVED``."""
        name, began = f"{one.where}: {one.breaks}", time.monotonic()
        copy = self.copies.get()
        path = copy / PACKAGE / one.path
        source = path.read_text()
        path.write_text(one.apply(source))
        try:
            outcome = self._find_killer(copy, room, known.get(name, SURVIVED))
        finally:
            path.write_text(source)
            self.copies.put(copy)
        print(f"{time.monotonic() - began:5.0f} s  {name}\n         {outcome}", flush=True)
        return name, outcome

    def _find_killer(self, copy: Path, room: str, known: str) -> str:
        if (copy / known.partition("::")[0]).exists() and self._catches(copy, known):
            return known
        for selection in RUNS:
            left_out: list[str] = []
            for _ in range(TIMES):
                command = ["-x", *selection, *TESTS[room].split(), *left_out]
                failed = self._run(copy, [*self.side_by_side, *command])
                if not failed:
                    break
                for test in failed:
                    # Alone, too: another test may have been at fault, or the load.
                    if self._catches(copy, test):
                        return test
                    left_out += ["--deselect", test]
        return SURVIVED

    def _catches(self, copy: Path, test: str) -> bool:
        """Return whether a test fails with the fault, and passes without it."""
        return bool(self._run(copy, [test])) and self.passes(test)

    def _run(self, copy: Path, arguments: list[str]) -> list[str]:
        """Run tests; return those that failed, or the first that was asked for if none began."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LONGEST
            )
        except subprocess.TimeoutExpired:
            return [arguments[-1]]
        found = re.findall(r"^(?:FAILED|ERROR) (tests/\S+?::.*?)(?: - .*)?$", done.stdout, re.M)
        # 5: nothing was selected.
        return found or ([arguments[-1]] if done.returncode not in {0, 5} else [])


def _copy_project(folder: Path) -> Path:
    """Copy what git knows, with the changes that are not committed."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    for name in files:
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / name)
    return folder


if __name__ == "__main__":
    sys.exit(main())
