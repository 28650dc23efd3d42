"""Type checkers know what the public names take and return."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from django_celery_safe import SafeTask, SafeTaskMixin

USES = Path(__file__).with_name("uses.py")
#: Marks a line in which mypy must find an error, with that error's code.
EXPECTED = re.compile(r"# E: ([a-z-]+)$")
#: What mypy prints of an error.
FOUND = re.compile(r"^[^:\n]+:(\d+): error: .* \[(\S+)\]$", re.MULTILINE)


@pytest.mark.long
def test_mypy_finds_the_mistakes_in_the_uses_and_no_others(tmp_path: Path) -> None:
    """Wrong arguments and options are errors, and what a send returns is known."""
    command = [sys.executable, "-m", "mypy", "--config-file=", "--strict", "--no-pretty"]
    checked = subprocess.run(
        [*command, f"--cache-dir={tmp_path}", str(USES)], capture_output=True, text=True
    )
    lines = USES.read_text().splitlines()
    expected = {
        (number, marked[1])
        for number, line in enumerate(lines, start=1)
        if (marked := EXPECTED.search(line))
    }
    found = {(int(number), code) for number, code in FOUND.findall(checked.stdout)}
    assert found == expected, checked.stdout + checked.stderr


def test_a_base_with_its_types_is_the_base() -> None:
    """At run time the types mean nothing, since Celery derives each task's class from it."""
    assert SafeTask[[int], str] is SafeTask
    assert SafeTaskMixin[[int], str] is SafeTaskMixin
