"""
What is known about the open transactions of this thread, and of their databases.

Django's ``TestCase`` wraps each test in ``atomic()`` blocks of its own; they
stand for "no transaction" and do not count here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from django.db import Error, InterfaceError, InternalError, OperationalError, connections

from .exceptions import ExcInfo, describe_error
from .texts import get_logger

if TYPE_CHECKING:
    from django.db.models import Model

T = TypeVar("T")

logger = get_logger(__name__)

#: Shortest and longest pause before a database that was away is asked again, s.
SHORTEST_PAUSE: Final = 0.05
LONGEST_PAUSE: Final = 1.0
#: How often a transaction that was refused begins again; each time somebody else moved on.
TRIES: Final = 20


#: Connections, and pools of them, that the parent had open when it forked this process.
#: Kept, since a client may end the session of a connection that nobody refers to.
_inherited: list[Any] = []
_leaving = threading.Lock()


def leave_inherited(alias: str) -> None:
    """
    Let this process connect to ``alias`` on its own if its parent had a connection open.

    Two processes on one connection read each other's answers. The parent's is not closed,
    because that would end the parent's session. One with a transaction open is left alone.
    """
    if not _inherited:
        return
    connection: Any = connections[alias]
    if connection.in_atomic_block:
        return
    if any(connection.connection is one for one in _inherited):
        connection.connection = None
    pools = getattr(connection, "_connection_pools", {})  # one dict for all threads
    with _leaving:
        if any(pools.get(alias) is one for one in _inherited):
            del pools[alias]


def _remember_inherited() -> None:
    global _leaving
    _leaving = threading.Lock()
    if "settings" not in vars(connections):
        return  # nobody has connected yet
    connection: Any
    for connection in connections.all(initialized_only=True):
        # A database in memory is this process's own copy.
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            continue
        pools = getattr(connection, "_connection_pools", {})
        _inherited.extend(one for one in [connection.connection, *pools.values()] if one)


os.register_at_fork(after_in_child=_remember_inherited)


def is_pooled(alias: str) -> bool:
    """Return whether connections to ``alias`` come from a pool of this process."""
    return bool(connections[alias].settings_dict.get("OPTIONS", {}).get("pool"))


def leave_pool(alias: str) -> None:
    """
    Let this thread connect to ``alias`` on its own, outside of psycopg's pool.

    For a thread of ours on which others depend: they may have all connections of the pool,
    and would wait for the thread with them.
    """
    connection: Any = connections[alias]
    if not is_pooled(alias) or connection.in_atomic_block:
        return
    connection.close()
    options = {**connection.settings_dict["OPTIONS"]}
    del options["pool"]
    connections[alias] = type(connection)({**connection.settings_dict, "OPTIONS": options}, alias)


def in_atomic(alias: str) -> bool:
    """Return whether ``alias`` is inside an ``atomic()`` block that is not TestCase's."""
    connection = connections[alias]
    return any(not _is_of_testcase(block) for block in connection.atomic_blocks)


def is_manual(alias: str) -> bool:
    """
    Return whether the project commits on ``alias`` itself: autocommit is off, without ``atomic()``.

    May connect, and raises the database's error if it can't.
    """
    connection = connections[alias]
    return not connection.in_atomic_block and not connection.get_autocommit()


def is_transaction_open(alias: str) -> bool:
    """
    Return whether the project has a transaction open here, which hides writes from others.

    A connection that was inherited from a parent process is left to the parent first. May
    connect, as :func:`is_manual`.
    """
    leave_inherited(alias)
    return in_atomic(alias) or is_manual(alias)


def in_testcase_only(alias: str) -> bool:
    """Return whether the only ``atomic()`` blocks open on ``alias`` are TestCase's."""
    connection = connections[alias]
    return bool(connection.atomic_blocks) and not in_atomic(alias)


def aliases_in_atomic() -> list[str]:
    """Return the aliases that are inside an ``atomic()`` block that is not TestCase's."""
    opened = [connection.alias for connection in connections.all(initialized_only=True)]
    return [alias for alias in opened if in_atomic(alias)]


@contextmanager
def losing_a_race() -> Iterator[None]:
    """Take it as no more than a lost race if stricter isolation refuses a single statement."""
    try:
        yield
    except OperationalError as error:
        if not _is_lost_race(error):
            raise


class Attempt:
    """One try of :func:`attempts`: a context manager that suppresses the error of a lost race."""

    def __init__(self, alias: str, what: str, *, last: bool) -> None:
        self._alias, self._what, self._last = alias, what, last
        #: Whether others were faster, and the next one is to be begun.
        self.is_lost = False
        self._is_won = False

    def win(self) -> None:
        """From here on an error is the caller's own: the block below has begun."""
        self._is_won = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: *ExcInfo) -> bool:
        error = exc_info[1]
        if self._is_won or not (isinstance(error, OperationalError) and _is_lost_race(error)):
            return False
        if self._last:
            # Under the same class and cause, which say that it is worth another try.
            raise OperationalError(
                f"{self._what} was refused: another transaction changed the row after this one "
                f"began, and the isolation level of {self._alias!r} hides that change. Nothing was "
                f"done. Roll the outer atomic() back and run all of it again, call this outside "
                f"of it, or use READ COMMITTED ({describe_error(error)})"
            ) from error.__cause__
        self.is_lost = True
        return True


def attempts(alias: str, what: str) -> Iterator[Attempt]:
    """
    Begin a transaction that locks a row, again and again while stricter isolation refuses it.

    Under REPEATABLE READ and SERIALIZABLE, PostgreSQL refuses to lock a row that others
    changed since the transaction began, which they did if it waited for them. A transaction
    that begins after that sees what they committed. Inside ``atomic()`` there is one
    attempt, since only who opened that can begin again.

    Example::

        for attempt in attempts(alias, "A change of run 7"):
            with attempt, transaction.atomic(using=alias):
                ...  # lock the row
                attempt.win()
                ...

    Args:
        what: Describes the transaction, for the error.

    Raises:
        OperationalError: From the last attempt, if that is lost too.
    """
    tries = 1 if connections[alias].in_atomic_block else TRIES
    for number in range(1, tries + 1):
        attempt = Attempt(alias, what, last=number == tries)
        yield attempt
        if not attempt.is_lost:
            return


def _is_lost_race(error: OperationalError) -> bool:
    cause = error.__cause__
    # PostgreSQL: serialization_failure.
    return "40001" in (getattr(cause, "sqlstate", None), getattr(cause, "pgcode", None))


@contextmanager
def busy_timeout(alias: str, seconds: float | None) -> Iterator[None]:
    """
    Let SQLite wait for so long for a database that somebody has locked; 0: not at all.

    Of other databases, and with None, nothing is changed.
    """
    connection = connections[alias]
    if connection.vendor != "sqlite" or seconds is None:
        yield
        return
    connection.ensure_connection()
    # Not by Django's cursor, which refuses to put it back in a broken transaction.
    execute = connection.connection.execute
    before = execute("PRAGMA busy_timeout").fetchone()[0]
    execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
    try:
        yield
    finally:
        execute(f"PRAGMA busy_timeout = {int(before)}")


def retry_on_disconnect(
    alias: str, ask: Callable[[], T], left: Callable[[], float], what: str
) -> T:
    """
    Ask a database that may have ended the connection, or be away for a moment.

    Args:
        ask: May be called again after its answer got lost.
        left: Tells for how many seconds it may be asked again; 0: once more, at once, by
            a new connection.
        what: What can't be noted meanwhile, for the log.

    Raises:
        django.db.Error: It does not answer, or a transaction is open, which is lost.
    """
    connection, pause, tries = connections[alias], SHORTEST_PAUSE, 0
    while True:
        try:
            return ask()
        except (OperationalError, InterfaceError, InternalError) as error:
            over = left() <= pause
            if connection.in_atomic_block or (tries and over):
                raise
            failure = describe_error(error)
        # It may be dead, or to a server that takes no more writes.
        connection.close()
        if tries:
            logger.warning("Could not record the outcome of %s; retrying: %s", what, failure)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        tries += 1


def lacks_table(alias: str, *models: type[Model]) -> bool:
    """Return whether the database is there and has not the tables of these models."""
    try:
        tables = connections[alias].introspection.table_names()
    except Error:
        return False
    return any(model._meta.db_table not in tables for model in models)


def _is_of_testcase(block: object) -> bool:
    # Django marks them itself, for atomic(durable=True); see TestCase._enter_atomics.
    return bool(getattr(block, "_from_testcase", False))
