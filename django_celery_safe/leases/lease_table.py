"""Leases in the rows of one of this package's tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Final

from django.apps import apps
from django.db import Error, connections

from ..exceptions import ConfigurationError, LockBackendError, describe_error
from ..transactions import busy_timeout, in_testcase_only, lacks_table, leave_pool
from .holder import HeldLock, decode_holder
from .store import LeaseStore, Renewable

#: SQLite's clock counts milliseconds, s: so much earlier a lease may end there.
CLOCK_TICK: Final = 0.001


class DatabaseLeases(LeaseStore):
    """
    Leases in a database, as the renewing thread sees them.

    Args:
        where: How messages call it.
        alias: Alias of the database.
    """

    connects_threads: ClassVar[bool] = True
    #: The purpose of the database, such as "hold the locks".
    purpose: ClassVar[str]
    #: Names of the models whose tables that needs.
    models: ClassVar[tuple[str, ...]]

    def __init__(self, where: str, alias: str) -> None:
        self.where, self.alias = where, alias

    def check_migrated(self, error: Exception) -> None:
        """
        Say what an error of the database means, if it is that a table is missing.

        Raises:
            ConfigurationError: It is.
        """
        find = apps.get_app_config("django_celery_safe").get_model
        if lacks_table(self.alias, *map(find, self.models)):
            raise ConfigurationError(
                f'DATABASES["{self.alias}"] is to {self.purpose}, and has no table for that. Run: '
                f"manage.py migrate django_celery_safe --database={self.alias}"
            ) from error

    def leave_pool(self) -> None:
        leave_pool(self.alias)

    def renews(self) -> bool:
        # Inside a TestCase the row is not committed: another thread can't see it.
        return not in_testcase_only(self.alias)

    def close(self) -> None:
        if not connections[self.alias].in_atomic_block:
            connections[self.alias].close()


class LeaseTable(DatabaseLeases):
    """
    The leases of what the rows of one table stand for.

    Args:
        rows: The name of its rows, such as "records".
        alias: Alias of the database.
    """

    early: ClassVar[float] = 2 * CLOCK_TICK

    def __init__(self, rows: str, alias: str) -> None:
        super().__init__(f'the {rows} in DATABASES["{alias}"]', alias)

    @abstractmethod
    def at(self, name: str) -> Any:
        """Return the rows with this name, one or none; they have ``extend(token, lease)``."""

    @abstractmethod
    def find(self, name: str) -> Any:
        """Return the row with this name, with the server's time as ``asked_at``; None: none."""

    def extend(self, renewals: Sequence[Renewable], within: float | None = None) -> list[bool]:
        with self._errors("extend"), busy_timeout(self.alias, within):
            return [
                bool(self.at(one.name).extend(one.token, timedelta(seconds=one.seconds)))
                for one in renewals
            ]

    def peek(self, name: str) -> HeldLock | None:
        with self._errors("peek"):
            row = self.find(name)
        return None if row is None else read_holder(name, row)

    @contextmanager
    def _errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except Error as error:
            # A connection that broke is made anew at the next use.
            connections[self.alias].close_if_unusable_or_obsolete()
            raise LockBackendError(self.where, action, describe_error(error)) from error


def read_holder(name: str, row: Any) -> HeldLock:
    """Return who has a row that was read at ``asked_at``, or had it last, and its lease."""
    left = 0.0 if row.ends_at is None else max(0.0, (row.ends_at - row.asked_at).total_seconds())
    return decode_holder(row.holder, HeldLock(name, row.token, left))
