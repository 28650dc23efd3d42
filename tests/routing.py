"""Database routers for the length of a block; processes that a test starts don't get them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import DEFAULT_DB_ALIAS, router


class NotInDefault:
    """
    A database router that keeps the package's tables out of the default database.

    That is in memory and of all tests: what relays all outboxes would leave a row there.
    """

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """Return False for the package's tables there; otherwise None, which is no opinion."""
        return False if (db, app_label) == (DEFAULT_DB_ALIAS, "django_celery_safe") else None


class AllIn(NotInDefault):
    """A database router: every table is in one database, and read from ``replica`` if given."""

    def __init__(self, alias: str, replica: str | None = None) -> None:
        self.alias, self.replica = alias, replica

    def db_for_read(self, model: Any, **hints: Any) -> str:
        """Return where rows are read."""
        return self.replica or self.alias

    def db_for_write(self, model: Any, **hints: Any) -> str:
        """Return where rows are written."""
        return self.alias

    def allow_relation(self, one: Any, other: Any, **hints: Any) -> bool:
        """Return True: the replica has the same rows."""
        return True


class ToRuns(NotInDefault):
    """A database router: the tables of runs are in ``alias``, all others anywhere."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        """Return where the runs and steps are."""
        return self.alias if model.__name__ in ("StageRun", "StageStep") else None

    db_for_write = db_for_read


@contextmanager
def routed_by(only: Any) -> Iterator[None]:
    """Have one router, and no other, in the block."""
    before = router.routers
    # Not by the setting, whose value goes to processes that a test starts, as JSON. Nor by
    # monkeypatch, which may end after the fixture whose router it found.
    router.routers = [only]
    try:
        yield
    finally:
        router.routers = before


@contextmanager
def runs_in(alias: str) -> Iterator[None]:
    """Have the runs written to ``alias`` in the block."""
    with routed_by(ToRuns(alias)):
        yield
