"""The settings of the running test, on their way to the processes it starts."""

import json
from collections.abc import Mapping
from typing import Any

from django.conf import settings as django_settings

from tests.overrides import VARIABLE, merge_settings


def settings_environment(changes: Mapping[str, Any] | None = None) -> dict[str, str]:
    """
    Return the environment variables that give a process the settings of this test.

    These are every database but the in-memory one, all caches, and what
    ``override_settings`` or the fixture ``settings`` changed.

    Args:
        changes: On top of that; databases and caches are merged alias by alias.

    Raises:
        TypeError: A setting is nothing that JSON can hold, such as a timedelta.
    """
    values = {
        **overridden_settings(),
        "CACHES": django_settings.CACHES,
        "DATABASES": {
            alias: database
            for alias, database in django_settings.DATABASES.items()
            if not lives_in_memory(database)
        },
    }
    merge_settings(values, changes or {})
    return {"DJANGO_SETTINGS_MODULE": "tests.settings", VARIABLE: json.dumps(values)}


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
