"""
The open transactions of this thread, and facts about their databases.

Django's ``TestCase`` wraps each test in ``atomic()`` blocks; these blocks do not count
as transactions here.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from django.db import (
    Error,
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
    transaction,
)
from django.db.backends.signals import connection_created

from .databases import is_lost_race
from .exceptions import ConfigurationError
from .texts import describe_error

if TYPE_CHECKING:
    from django.db.models import Model

T = TypeVar("T")

#: Errors of a statement whose connection is dead, or whose server does not accept writes.
DISCONNECTED: Final = (OperationalError, InterfaceError, InternalError)
#: How many times a refused transaction is tried; each time, another transaction succeeded.
TRIES: Final = 20
#: The prefix of our tables' names.
OUR_TABLES: Final = "django_celery_safe_"
#: How statements begin that change nothing but our tables.
OUR_STATEMENTS: Final = re.compile(
    rf'(SELECT .*|(UPDATE|DELETE FROM|INSERT (IGNORE )?INTO) ["`]?){OUR_TABLES}', re.DOTALL
)
#: Rows that one statement changes by their keys; every database accepts that many parameters.
MOST_KEYS: Final = 500
#: Time after which there is no further try, s: each may have waited for a lock until the
#: database's timeout.
LONGEST_RACE: Final = 20.0


#: The connections that this thread has opened, as attributes named by their aliases.
_here: Final = threading.local()


def is_pooled(alias: str) -> bool:
    """Return whether connections to ``alias`` come from a pool of this process."""
    return bool(connections[alias].settings_dict.get("OPTIONS", {}).get("pool"))


def leave_pool(alias: str) -> None:
    """
    Give this thread its own connection to ``alias``, outside of psycopg's pool.

    It is for our threads that other threads wait for: the waiting threads may hold all the
    connections of the pool, and that would be a deadlock.
    """
    connection: Any = connections[alias]
    if not is_pooled(alias) or connection.in_atomic_block:
        return
    connection.close()
    options = {**connection.settings_dict["OPTIONS"], "pool": None}
    connections[alias] = type(connection)({**connection.settings_dict, "OPTIONS": options}, alias)


def in_atomic(alias: str) -> bool:
    """Return whether ``alias`` is inside an ``atomic()`` block other than TestCase's."""
    connection = connections[alias]
    return any(not _is_of_testcase(block) for block in connection.atomic_blocks)


def is_transaction_open(connection: Any) -> bool:
    """
    Return whether the project has a transaction open here, which hides writes from others.

    That is an ``atomic()``, or autocommit is off. Does not connect: a new connection begins as
    DATABASES says.
    """
    if connection.in_atomic_block:
        return in_atomic(connection.alias)
    is_open, settings = connection.connection is not None, connection.settings_dict
    return not (connection.autocommit if is_open else settings["AUTOCOMMIT"])


def reconnect(alias: str) -> None:
    """Replace a connection, which rolls back what is open on it; TestCase's is left alone."""
    connection = connections[alias]
    if is_in_testcase(alias):
        return
    with suppress(Error):
        connection.close()
        if connection.connection is None or connection.closed_in_transaction:
            connection.connect()


def in_testcase_only(alias: str) -> bool:
    """Return whether the only ``atomic()`` blocks open on ``alias`` are TestCase's."""
    return is_in_testcase(alias) and not in_atomic(alias)


def is_in_testcase(alias: str) -> bool:
    """Return whether an ``atomic()`` block of a TestCase is open on ``alias``."""
    return any(map(_is_of_testcase, connections[alias].atomic_blocks))


def aliases_in_atomic() -> list[str]:
    """Return the aliases that are inside an ``atomic()`` block other than TestCase's."""
    opened = connections.all(initialized_only=True)
    return [one.alias for one in opened if one.in_atomic_block and in_atomic(one.alias)]


def has_block() -> bool:
    """
    Return whether a connection that this thread has opened is inside an ``atomic()`` block.

    In a tenth of the time of :func:`aliases_in_atomic`, which also finds connections that
    another thread has opened and shares, as in a test with a live server.
    """
    for connection in _here.__dict__.values():  # noqa: SIM110 - any() takes twice as long
        if connection.in_atomic_block:
            return True
    return False


@dataclass(eq=False)
class Attempts(AbstractContextManager["Attempts", bool]):
    """
    Tries of a transaction that locks a row, until stricter isolation does not refuse it.

    Under REPEATABLE READ and SERIALIZABLE, PostgreSQL refuses to lock a row that another
    transaction changed since this one started, as it did if this one waited for it. A new
    transaction sees those changes. MySQL ends one of two deadlocked transactions, and any
    that waits for too long. A connection from before may have been cut while it was idle; then
    there is one more try, on a new connection. Inside ``atomic()`` there is one attempt, because
    only the code that opened the block can start it again.

    Example::

        for attempt in Attempts(alias, "A change of run 7"):
            with attempt, transaction.atomic(using=alias):
                ...  # lock the row
                attempt.is_won = True
                ...

    Attributes:
        what: Describes the transaction, for the error.
        is_won: Whether the caller has the lock, as it says: from then on an error is its own.
        is_written: Whether the caller only has to commit: a connection that is cut meanwhile may
            have.
        began: When the first attempt began, by ``time.monotonic()``.

    Raises:
        OperationalError: The last attempt lost the race, too.
    """

    alias: str
    what: str
    is_won: bool = False
    is_written: bool = False
    began: float = field(default_factory=time.monotonic)
    _is_lost: bool = False

    def __iter__(self) -> Iterator[Self]:
        connection = connections[self.alias]
        self._left = 1 if connection.in_atomic_block else TRIES
        #: The connection from before, which may have been cut; None: there is none.
        self._session = connection.connection if is_autocommit(connection) else None
        self._give_up_at = self.began + LONGEST_RACE
        while self._left:
            self._left -= 1
            # Not asked after it: it may have waited for long, and a further one sees the change.
            self._is_last = not self._left or time.monotonic() > self._give_up_at
            self.is_written = self._is_lost = False
            yield self
            if not self._is_lost:
                return

    def __exit__(self, *exc_info: Any) -> bool:
        error = exc_info[1]
        if self.is_won or not isinstance(error, DISCONNECTED):
            return False
        if isinstance(error, OperationalError) and is_lost_race(error):
            if self._is_last:
                # The class and the cause stay, so callers see that another try is worthwhile.
                raise OperationalError(
                    f"{self.what} was refused: another transaction changed the row after this one "
                    f"began, and the isolation level of {self.alias!r} hides that change, or each "
                    f"waits for the other. Nothing was done. If it was inside atomic(), run that "
                    f"block again from its start, or make this call outside of it; or use READ "
                    f"COMMITTED ({describe_error(error)})"
                ) from error.__cause__
            self._is_lost = True
        elif self._left and self._session is not None and not self.is_written:
            self._is_lost = replace_if_cut(self.alias, self._session)
            self._session = None  # one more try is enough
        return self._is_lost


def change_locked(rows: Any, columns: Sequence[str], **sets: Any) -> list[tuple[Any, ...]]:
    """
    Update or delete the rows of a queryset, and return columns of each row as it was before.

    Args:
        sets: The new values; none: delete the rows, without Django's signals, whose receivers
            could fail.
    """
    alias, found = rows.db, list[tuple[Any, ...]]()
    for attempt in Attempts(alias, f"A change of {rows.model._meta.verbose_name_plural}"):
        with attempt, transaction.atomic(using=alias):
            lock_whole(alias, rows.model)
            # All processes lock in the same order, so that they can't deadlock.
            locked = rows.order_by("pk").select_for_update()
            found = list(locked.values_list("pk", *columns))
            for first in range(0, len(found), MOST_KEYS):
                keys = [row[0] for row in found[first : first + MOST_KEYS]]
                own = rows.model._base_manager.using(alias).filter(pk__in=keys)
                own.update(**sets) if sets else own._raw_delete(alias)
    return [row[1:] for row in found]


def lock_whole(alias: str, model: type[Model]) -> None:
    """Take the single lock of a database that can't lock rows, such as SQLite: any write does."""
    connection = connections[alias]
    if not connection.features.has_select_for_update:
        table = connection.ops.quote_name(model._meta.db_table)
        with connection.cursor() as cursor:
            cursor.execute(f"DELETE FROM {table} WHERE 1 = 0")  # noqa: S608


def is_autocommit(connection: Any) -> bool:
    """Return whether an open connection commits each statement at once."""
    return connection.autocommit and not connection.in_atomic_block


def replace_if_cut(alias: str, session: object) -> bool:
    """
    Replace a connection on which a statement failed, if it is dead; return whether it was.

    Args:
        session: The database client's connection before the statement.
    """
    connection: Any = connections[alias]
    # Django replaces it itself if the rollback of an atomic() block fails.
    is_cut = connection.connection is not session
    if connection.connection is None or not connection.is_usable():
        is_cut = True
        connection.close()
        if is_pooled(alias):
            connection.pool.check()  # the pool's other connections were idle, too
    return is_cut


def connect() -> None:
    """Register the repetition of single statements on our tables, outside of transactions."""
    connection_created.connect(_on_connection, dispatch_uid=__name__)
    _here.__dict__.update({one.alias: one for one in connections.all(initialized_only=True)})


def _on_connection(connection: Any, **kwargs: Any) -> None:
    _here.__dict__[connection.alias] = connection
    wrappers = connection.execute_wrappers
    if connection.vendor != "sqlite" and _execute_repeatedly not in wrappers:
        # Not the last one: a block of execute_wrapper() that connects removes the last at its end.
        wrappers.insert(0, _execute_repeatedly)


def _execute_repeatedly(
    execute: Callable[..., T], sql: Any, params: Any, many: bool, context: Any
) -> T:
    """
    Execute a statement; repeat it if it lost a race, or its connection was cut, as idle ones are.

    On MySQL, two statements may deadlock if one locks an index first and the other its row.
    Under SERIALIZABLE, PostgreSQL refuses one of two statements. No statement of ours does
    something else if an earlier execution was written and only its answer got lost; a message
    may then have two rows, which are claimed and ended together, or sent one after the other.
    """
    connection = context["connection"]
    session, began = connection.connection, time.monotonic()
    try:
        return execute(sql, params, many, context)
    except DISCONNECTED as error:
        if not (is_autocommit(connection) and isinstance(sql, str) and OUR_STATEMENTS.match(sql)):
            raise
        failures = [error]
    for attempt in Attempts(connection.alias, "A statement", began=began):
        with attempt:
            if failures:
                raise failures.pop()
            if connection.connection is not session:
                # The caller reads the answer from its own cursor.
                context["cursor"].cursor = connection.cursor().cursor
            answer = execute(sql, params, many, context)
    return answer


@contextmanager
def busy_timeout(alias: str, seconds: float | None) -> Iterator[None]:
    """
    Set how long SQLite waits for a locked database in the block; 0: it does not wait.

    On other databases, and with None, nothing changes.
    """
    connection = connections[alias]
    if connection.vendor != "sqlite" or seconds is None:
        yield
        return
    connection.ensure_connection()
    # Not through Django's cursor, which could not restore the value in a broken transaction.
    execute = connection.connection.execute
    before = execute("PRAGMA busy_timeout").fetchone()[0]
    execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
    try:
        yield
    finally:
        execute(f"PRAGMA busy_timeout = {int(before)}")


def lacks_table(alias: str, *models: str) -> bool:
    """Return whether the database answers but lacks the tables of our models with these names."""
    try:
        tables = connections[alias].introspection.table_names()
    except Error:
        return False
    return not {f"{OUR_TABLES}{name.lower()}" for name in models}.issubset(tables)


def refuse_unmigrated(alias: str, purpose: str, models: Sequence[str], error: Exception) -> None:
    """
    Raise an error that explains a database error, if a missing table caused it.

    Args:
        purpose: What the project needs the database for, such as "hold the locks".

    Raises:
        ConfigurationError: A table of these models is missing.
    """
    if lacks_table(alias, *models):
        raise ConfigurationError(
            f'DATABASES["{alias}"] is to {purpose}, and has no table for that. Run: manage.py '
            f"migrate django_celery_safe --database={alias}"
        ) from error


def _is_of_testcase(block: object) -> bool:
    # Django marks these blocks for atomic(durable=True); see TestCase._enter_atomics.
    return bool(getattr(block, "_from_testcase", False))
