"""
Which database servers this app works on; it refuses all others.

On a server on which it was never tested a statement may be an error, or worse, do something
else without a word. :func:`refuse_untested` is asked wherever something is about to be kept.
"""

from __future__ import annotations

from typing import Final

from django.db import connections

from .exceptions import BackendNotSupported

#: What ``connection.vendor`` is on the servers on which all tests run.
TESTED: Final = frozenset({"postgresql", "sqlite"})
#: The vendor of a project without a database, whose first query raises an error.
NO_DATABASE: Final = "unknown"


def is_tested(alias: str) -> bool:
    """Return whether the database is of a kind on which this app was tested."""
    return connections[alias].vendor in TESTED


def refuse_untested(alias: str, what: str) -> None:
    """
    Refuse a database of a kind on which this app was never tested.

    Args:
        what: What it was to do, such as "hold locks".

    Raises:
        BackendNotSupported: It is neither PostgreSQL nor SQLite.
    """
    vendor = connections[alias].vendor
    if vendor in TESTED or vendor == NO_DATABASE:
        return
    raise BackendNotSupported(
        f'DATABASES["{alias}"] ({vendor})',
        "django_celery_safe was tested on PostgreSQL and SQLite alone, and on other databases "
        "its statements fail, or do something else without a word",
        "Let an alias on PostgreSQL or SQLite do it.",
        what,
    )
