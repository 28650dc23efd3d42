"""The files of past runs: what was run when, with which versions, and what came of it."""

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.servers.programs import ProgramNotFound, find_programs_folder

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "evidence"

#: Packages whose versions matter to what is measured.
PACKAGES = ("Django", "celery", "kombu", "redis", "django-redis", "psycopg")

#: For each server its program, and the program beside it that says its version.
SERVERS = {
    "PostgreSQL": ("postgres", "postgres", "--version"),
    "MariaDB": ("mariadbd", "mariadbd", "--version"),
    "Redis": ("redis-server", "redis-server", "--version"),
    "RabbitMQ": ("rabbitmq-server", "rabbitmqctl", "version"),
}


@dataclass(frozen=True)
class Evidence:
    """
    A file of past runs.

    Args:
        kind: The command: faults or benchmarks.
        command: The command line that started the runs.
        date: The day on which the runs began, as 2026-11-23; UTC.
        versions: Of Python, packages, servers and this code, by their names.
        machine: Processors and system.
        results: The output of each run.
    """

    kind: str
    command: str
    date: str
    versions: Mapping[str, str]
    machine: str
    results: Sequence[Mapping[str, Any]]


def save(kind: str, arguments: Sequence[str], results: Sequence[Mapping[str, Any]]) -> Path:
    """Write a new file of what was run just now; return its path."""
    command = " ".join(("python -m", f"tests.{kind}", *arguments))
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    machine = f"{os.cpu_count()} processors, {platform.system()} {platform.machine()}"
    evidence = Evidence(kind, command, date, find_versions(), machine, results)
    FOLDER.mkdir(exist_ok=True)
    names = (f"{date}-{kind}-{number}.json" for number in range(1, 1000))
    path = next(path for path in (FOLDER / name for name in names) if not path.exists())
    path.write_text(json.dumps(asdict(evidence), indent=1) + "\n")
    return path


def load(kind: str, folder: Path) -> list[Evidence]:
    """Return the files of a kind, the oldest first."""
    paths = sorted(folder.glob(f"*-{kind}-*.json"))
    return [Evidence(**json.loads(path.read_text())) for path in paths]


def find_versions() -> dict[str, str]:
    """Return the versions of this code, of Python, of packages and servers, by their names."""
    commit = _run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD").strip()
    servers = {name: _find_number(_run(*_command(*found))) for name, found in SERVERS.items()}
    return {
        "django_celery_safe": f"{version('django-celery-safe')} at {commit or 'no commit'}",
        "Python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        **{name: number for name, number in servers.items() if number},
    }


def _command(program: str, teller: str, option: str) -> list[str]:
    try:
        return [str(find_programs_folder(program) / teller), option]
    except ProgramNotFound:
        return ["true"]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout


def _find_number(text: str) -> str:
    found = re.search(r"\d+(\.\d+)+", text)
    return found[0] if found else ""
