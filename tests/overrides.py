"""
How the settings of a test reach the processes that it starts: the reading side.

``tests.processes.settings`` is the writing side; ``tests.settings`` reads. Here is
nothing but the standard library, because every Celery worker of a test imports it.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

#: Holds, as JSON, what tests/settings.py reads in another process.
VARIABLE = "SAFE_TEST_SETTINGS"

#: Settings that are merged alias by alias; every other one is replaced.
MERGED = ("CACHES", "DATABASES")


def read_settings(into: dict[str, Any]) -> None:
    """Change the settings of this process to those of the test that started it."""
    if text := os.environ.get(VARIABLE):
        merge_settings(into, json.loads(text))


def merge_settings(target: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put changed settings into ``target``; databases and caches alias by alias."""
    for name, value in changes.items():
        target[name] = {**target.get(name, {}), **value} if name in MERGED else value
