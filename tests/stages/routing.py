"""A router that has the runs written to the database of a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.db import router


class ToRuns:
    """A database router: the tables of runs are in ``alias``, all others anywhere."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        """Return where the runs and steps are."""
        return self.alias if model.__name__ in ("StageRun", "StageStep") else None

    db_for_write = db_for_read


@contextmanager
def runs_in(alias: str) -> Iterator[None]:
    """Have the runs written to ``alias`` in the block; processes don't get that from here."""
    before = router.routers
    # Not by the setting, whose value goes to processes that a test starts, as JSON.
    router.routers = [ToRuns(alias)]
    try:
        yield
    finally:
        router.routers = before
