"""
The supported database servers and the differences between them; other servers are refused.

On an untested server a statement may fail or, worse, silently do something else. All code
that stores something calls :func:`refuse_untested` first. Django uses the same engine for
MySQL and MariaDB.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final
from zoneinfo import ZoneInfo

from django.db import connections
from django.db.models import BigIntegerField, Func, functions

from .exceptions import ConfigurationError

#: ``connection.vendor`` of MariaDB and MySQL.
MYSQL: Final = "mysql"
#: ``connection.vendor`` of the servers on which all tests run.
TESTED: Final = frozenset({"postgresql", "sqlite", MYSQL})
#: The vendor in a project without a database; there the first query raises an error.
NO_DATABASE: Final = "unknown"
#: Codes of errors. PostgreSQL: serialization_failure. MySQL: deadlock, lock wait timeout, and a row
#: that was changed since the transaction started (MariaDB, with innodb_snapshot_isolation).
LOST_RACES: Final = frozenset({"40001", 1213, 1205, 1020})
#: Those of a failed NOWAIT. PostgreSQL: lock_not_available. SQLite: SQLITE_BUSY, SQLITE_LOCKED.
#: MySQL has its own, MariaDB uses the timeout's.
TAKEN: Final = frozenset({"55P03", 5, 6, 3572, 1205})
#: Most bytes of one INSERT. MariaDB accepts 16 MB by default, and each byte may be escaped.
PACKET_BYTES: Final = 4 * 1024 * 1024
#: Bytes of the messages that a process handles at a time. It needs several times that much
#: memory, because a broker's client encodes each message once more.
BATCH_BYTES: Final = 16 * 1024 * 1024


class Now(functions.Now):
    """
    The database server's time, like Django's; on MySQL in UTC, as Django writes moments there.

    In a MySQL session's own time zone, every lease would end when summer time starts.
    """

    def as_mysql(self, compiler: Any, connection: Any, **extra: Any) -> Any:
        return "UTC_TIMESTAMP(6)", []


def read_moment(alias: str, moment: datetime) -> datetime:
    """Return a time that Django read from a column that :class:`Now` has written, in UTC."""
    connection = connections[alias]
    if connection.vendor != "postgresql":
        return moment.replace(tzinfo=UTC)
    zone = moment.tzinfo or ZoneInfo(connection.timezone_name)
    return moment.replace(tzinfo=zone).astimezone(UTC)


class ServerMicroseconds(Func):
    """The database server's clock, µs since the epoch; not frozen inside a transaction."""

    output_field = BigIntegerField()

    def as_sql(self, compiler: Any, connection: Any, *args: Any, **extra: Any) -> Any:
        return CLOCKS[connection.vendor], []


CLOCKS: Final = {
    "postgresql": "CAST(date_part('epoch', clock_timestamp()) * 1000000 AS bigint)",
    "sqlite": "CAST((julianday('now') - 2440587.5) * 86400000000 AS integer)",
    MYSQL: "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))",
}


def exact_collation(connection: Any) -> str | None:
    """Return the collation that compares bytes; None: the database does so by default."""
    if connection.vendor != MYSQL:
        return None
    # Both are NO PAD: with PAD SPACE, "a" would equal "a ".
    return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"


def is_lost_race(error: BaseException) -> bool:
    """Return whether a database refused a statement because another transaction was faster."""
    return not LOST_RACES.isdisjoint(_find_codes(error))


def says_taken(error: BaseException) -> bool:
    """Return whether the error means that another transaction has the row locked."""
    return not TAKEN.isdisjoint(_find_codes(error))


def _find_codes(error: BaseException) -> list[Any]:
    """Return what may be the database's own code of an error."""
    cause: Any = error.__cause__
    states = [getattr(cause, name, None) for name in ("sqlstate", "pgcode")]
    # SQLite's basic code; and MySQL's number.
    return [*states, getattr(cause, "sqlite_errorcode", 0) & 0xFF, *getattr(cause, "args", ())[:1]]


def is_read_only(alias: str) -> bool:
    """Return whether the database is a read-only replica."""
    asked = {"postgresql": "SHOW transaction_read_only", MYSQL: "SELECT @@global.read_only"}
    connection = connections[alias]
    if connection.vendor not in asked:
        return False
    with connection.cursor() as cursor:
        cursor.execute(asked[connection.vendor])
        return str(cursor.fetchone()[0]) not in {"off", "0", "OFF"}


def refuse_untested(alias: str, what: str) -> None:
    """
    Refuse a kind of database on which this app was never tested, without querying a server.

    Args:
        what: The database's purpose, such as "hold locks".

    Raises:
        ConfigurationError: It is not PostgreSQL, MariaDB, MySQL or SQLite.
    """
    connection = connections[alias]
    if connection.vendor in TESTED or connection.vendor == NO_DATABASE:
        return
    raise ConfigurationError(
        f'DATABASES["{alias}"] ({connection.vendor}) can\'t {what}: django_celery_safe was tested '
        f"on PostgreSQL, MariaDB and SQLite alone, and on other databases its statements fail, or "
        f"do something else without a word. Let an alias on PostgreSQL, MariaDB, MySQL or SQLite "
        f"do it."
    )


def find_unfit(alias: str, table: str = "") -> tuple[str, str] | None:
    """Return why tables on MySQL or MariaDB can't be used, and advice; None: they can be used."""
    connection = connections[alias]
    if connection.vendor != MYSQL:
        return None
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = "
            "DATABASE() AND (table_name LIKE 'django_celery_safe_%%' OR table_name = %s) "
            "AND engine <> 'InnoDB'",
            [table],
        )
        found = cursor.fetchall()
    if not found:
        return None
    names = ", ".join(f"{one} ({engine})" for one, engine in sorted(found))
    alters = " ".join(f"ALTER TABLE {one} ENGINE=InnoDB;" for one, _ in sorted(found))
    return f"tables there have no transactions: {names}", f"Run in the database: {alters}"
