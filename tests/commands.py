"""Running a management command as a person does, in this process, or a program in its own."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, ManagementUtility, call_command


def run(command: str, *arguments: str) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    call_command(command, *arguments, stdout=out)
    return out.getvalue()


def run_in_80_columns(command: str, *arguments: str) -> str:
    """Return what a command prints; people get lines of 80 columns."""
    text = run(command, *arguments)
    assert "--json" in arguments or max(map(len, text.splitlines())) <= 80
    return text


def listed(command: str, *arguments: str) -> list[dict[str, Any]]:
    """Return the rows that ``list --json`` shows."""
    rows: list[dict[str, Any]] = json.loads(run(command, "list", "--json", *arguments))
    return rows


def refused(command: str, *arguments: str) -> tuple[str, str]:
    """Return what a command prints before it fails, and with what."""
    out = io.StringIO()
    with pytest.raises(CommandError) as caught:
        call_command(command, *arguments, stdout=out)
    return out.getvalue(), str(caught.value)


def status_of_program(command: str, *arguments: str) -> int:
    """Return the exit status of ``manage.py <command>``."""
    try:
        ManagementUtility(["manage.py", command, *arguments]).execute()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def of(command: str) -> list[Callable[..., Any]]:
    """Return what runs one command: here, for the rows of its list, to its error, to its end."""
    functions: list[Callable[..., Any]] = [run_in_80_columns, listed, refused, status_of_program]
    return [partial(function, command) for function in functions]


def run_python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> str:
    """Return what Python prints with these arguments; it has to end well, and in two minutes."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
