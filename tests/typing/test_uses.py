"""Type checkers know what the public names take and return."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from django_celery_safe import SafeTask, SafeTaskMixin

USES = Path(__file__).with_name("uses.py")
#: Marks a line in which mypy must find an error, with that error's code.
EXPECTED = re.compile(r"# E: ([a-z-]+)$")
#: A line that mypy prints for an error.
FOUND = re.compile(r"^[^:\n]+:(\d+): error: .* \[(\S+)\]$", re.MULTILINE)


@pytest.fixture(scope="module")
def expected() -> dict[int, str]:
    """mypy's code of each line with a mistake."""
    lines = enumerate(USES.read_text().splitlines(), start=1)
    return {number: marked[1] for number, line in lines if (marked := EXPECTED.search(line))}


@pytest.mark.long
def test_mypy_finds_the_mistakes_in_the_uses_and_no_others(
    expected: dict[int, str], tmp_path: Path
) -> None:
    """Wrong arguments and options are errors, and what a send returns is known."""
    command = [sys.executable, "-m", "mypy", "--config-file=", "--strict", "--no-pretty"]
    checked = subprocess.run(
        [*command, f"--cache-dir={tmp_path}", str(USES)], capture_output=True, text=True
    )
    found = [(int(number), code) for number, code in FOUND.findall(checked.stdout)]
    assert sorted(found) == sorted(expected.items()), checked.stdout + checked.stderr


@pytest.mark.long
def test_pyright_finds_the_same_mistakes(expected: dict[int, str], tmp_path: Path) -> None:
    """In its standard mode, as editors check; basedpyright is pyright in a wheel."""
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    shutil.copy(USES, tmp_path)
    python = f"--pythonpath={sys.executable}"
    checked = subprocess.run(
        [sys.executable, "-m", "basedpyright", python, "--outputjson", "-p", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    found = json.loads(checked.stdout)["generalDiagnostics"]
    lines = {one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"}
    assert lines == expected.keys(), found


def test_a_base_with_its_types_is_the_base() -> None:
    """At run time the types mean nothing, since Celery derives each task's class from it."""
    assert SafeTask[[int], str] is SafeTask
    assert SafeTaskMixin[[int], str] is SafeTaskMixin
