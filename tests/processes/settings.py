"""The settings of the running test, written down for the processes it starts."""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from django.conf import settings as django_settings

#: Names the file that tests/settings.py reads in another process.
VARIABLE = "SAFE_TEST_SETTINGS"

#: Settings that are merged alias by alias; every other one is replaced.
MERGED = ("CACHES", "DATABASES")


def read_settings(into: dict[str, Any]) -> None:
    """Change the settings of this process to what the test that started it wrote down."""
    if path := os.environ.get(VARIABLE):
        merge_settings(into, json.loads(Path(path).read_text()))


def merge_settings(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put changed settings into ``target``; databases and caches alias by alias."""
    for name, value in changes.items():
        target[name] = {**target.get(name, {}), **value} if name in MERGED else value


@contextmanager
def settings_file(changes: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """
    Write the test's settings to a JSON file that lives as long as the block.

    It holds every database but the in-memory one, all caches, and what
    ``override_settings`` or the fixture ``settings`` changed.

    Args:
        changes: On top of that; databases and caches are merged alias by alias.
    """
    values = current_settings()
    merge_settings(values, changes or {})
    descriptor, name = tempfile.mkstemp(prefix="safe-settings-", suffix=".json")
    path = Path(name)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(values, file)
        yield path
    finally:
        path.unlink(missing_ok=True)


def environment_for(path: Path) -> dict[str, str]:
    """Return the variables that make a process use the settings in this file."""
    return {VARIABLE: str(path), "DJANGO_SETTINGS_MODULE": "tests.settings"}


def current_settings() -> dict[str, Any]:
    """Return what differs here from tests/settings.py as another process would read it."""
    return {
        **overridden_settings(),
        "CACHES": django_settings.CACHES,
        "DATABASES": {
            alias: database
            for alias, database in django_settings.DATABASES.items()
            if not lives_in_memory(database)
        },
    }


def overridden_settings() -> dict[str, Any]:
    """Return the settings that tests changed, the latest change of each."""
    found: dict[str, Any] = {}
    holder: Any = django_settings._wrapped  # type: ignore[misc] # Django's own, not in the stubs.
    # Every override is a holder around the settings before it.
    while hasattr(holder, "default_settings"):
        for name, value in vars(holder).items():
            if name.isupper():
                found.setdefault(name, value)
        holder = holder.default_settings
    return found


def lives_in_memory(database: Mapping[str, Any]) -> bool:
    """Whether no other process can open this database."""
    name = str(database["NAME"])
    return name == ":memory:" or "mode=memory" in name
