"""
Applies each mutation to a copy of the project and runs the tests of its room.

``python -m tests.mutations`` ends with 1 if a mutation survives that ``survivors.txt`` does not
name. ``--room`` and ``--match`` choose some of them; ``--check`` only applies them.
"""

import argparse
import ast
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from . import TESTS, Mutation
from .faults import MUTATIONS

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGE: Final = "django_celery_safe"
SURVIVORS: Final = Path(__file__).with_name("survivors.txt")
#: Longest run of the tests of a room, s. A fault that makes a test hang is caught, too.
LONGEST: Final = 1800


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
            ast.parse(one.apply((ROOT / PACKAGE / one.path).read_text()))
        print(f"{len(chosen)} mutations can be applied")
        return 0
    known = set(SURVIVORS.read_text().splitlines()) if SURVIVORS.exists() else set()
    with TemporaryDirectory() as folder:
        copy = _copy_project(Path(folder))
        for room in dict.fromkeys(room for room, _ in chosen):
            if not _are_green(copy, room, options.processes):
                print(f"The tests of {room} fail without a mutation.", file=sys.stderr)
                return 2
        survivors = [_name(one) for room, one in chosen if not _is_caught(copy, room, one, options)]
    new = [name for name in survivors if name not in known]
    print(f"{len(chosen)} mutations, {len(survivors)} survived, {len(new)} of them new")
    for name in survivors:
        print(f"{'NEW ' if name in new else '    '}{name}")
    return int(bool(new))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--room", action="append", choices=MUTATIONS, help="may be repeated")
    parser.add_argument("--match", default="", help="a part of a place or of what it breaks")
    parser.add_argument("--check", action="store_true", help="apply them, and run no test")
    parser.add_argument("-n", "--processes", default="2", help="as for pytest; 2 by default")
    return parser.parse_args()


def _name(one: Mutation) -> str:
    return f"{one.where}: {one.breaks}"


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


def _is_caught(copy: Path, room: str, one: Mutation, options: argparse.Namespace) -> bool:
    """Run the tests of a room with one mutation; return whether one of them failed."""
    path, began = copy / PACKAGE / one.path, time.monotonic()
    source = path.read_text()
    path.write_text(one.apply(source))
    try:
        caught = not _are_green(copy, room, options.processes)
    finally:
        path.write_text(source)
    outcome = "caught" if caught else "SURVIVED"
    print(f"{outcome:<9}{time.monotonic() - began:5.0f} s  {_name(one)}", flush=True)
    return caught


def _are_green(copy: Path, room: str, processes: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-m", "not long", "-n", processes, "--dist", "worksteal", *TESTS[room].split()]
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, timeout=LONGEST
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
