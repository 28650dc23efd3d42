"""Leases that are kept in the rows of a table of ours, as the renewing thread sees them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Final

from django.db import Error, connections

from ...exceptions import LockBackendError, describe_error
from ...transactions import busy_timeout, in_testcase_only, leave_pool
from .base import HeldLock, LeaseStore, Renewable, decode_holder

#: SQLite's clock counts milliseconds, s: so much earlier a lease may end there.
TICK: Final = 0.001


class RowStore(LeaseStore):
    """
    The leases in one table of a database.

    Args:
        what: What the rows are, such as "records".
        alias: Alias of the database.
    """

    connects_threads: ClassVar[bool] = True
    early: ClassVar[float] = 2 * TICK

    def __init__(self, what: str, alias: str) -> None:
        self.where = f'the {what} in DATABASES["{alias}"]'
        self.alias = alias

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

    def leave_pool(self) -> None:
        leave_pool(self.alias)

    def renews(self) -> bool:
        # Inside a TestCase the row is not committed: another thread can't see it.
        return not in_testcase_only(self.alias)

    def close(self) -> None:
        if not connections[self.alias].in_atomic_block:
            connections[self.alias].close()

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
    left = max(0.0, (row.ends_at - row.asked_at).total_seconds())
    return decode_holder(row.holder, HeldLock(name, row.token, left))
