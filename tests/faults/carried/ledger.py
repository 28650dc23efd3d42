"""
A table of the recorder's own, which senders and the database itself fill.

Both write in the transactions that they watch. So a record is there if the transaction was
committed, even if its process was killed right after the commit.
"""

import time
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from django.db import connections

from django_celery_safe.models import OutboxMessage

#: The sender's note that a transaction sends a task.
COMMITTED: Final = "committed"

#: The notes about a task's row: it is gone, its task failed, a process died in its task, and it
#: is sent again since no worker began its task.
GONE: Final = "gone"
FAILED: Final = "failed"
DEATH: Final = "death"
RESENT: Final = "resent"

#: Moments are in µs since 1970; the time left of a lease, ``lease``, is in s.
_TABLE: Final = """
CREATE TABLE carried_ledger (
    what varchar(9) NOT NULL, task_id varchar(255) NOT NULL, at bigint NOT NULL,
    lease double precision NULL, holder text NULL
)
"""

#: For each record, the trigger's event, its condition, and the version of the row that it reads.
_TRIGGERS: Final = {
    GONE: ("DELETE", "", "OLD"),
    FAILED: ("UPDATE OF ended_at", "WHEN (OLD.ended_at IS NULL)", "OLD"),
    RESENT: ("UPDATE OF resent", "WHEN (NEW.resent > OLD.resent)", "OLD"),
    DEATH: ("UPDATE OF deaths", "WHEN (NEW.deaths > OLD.deaths)", "OLD"),
}

#: The time in UTC at this very moment, as MySQL has it in a trigger, too.
_NOW: Final = "convert_tz(sysdate(6), @@session.time_zone, '+00:00')"

#: For each database, SQL for the current time in µs, and for the seconds until a row's ``due_at``.
#: SQLite counts ms and cuts off the rest, so a record would seem earlier than its event: one ms
#: is added.
_CLOCKS: Final = {
    "postgresql": (
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
        "extract(epoch FROM {row}.due_at - clock_timestamp())",
    ),
    "mysql": (
        f"timestampdiff(MICROSECOND, '1970-01-01', {_NOW})",
        f"timestampdiff(MICROSECOND, {_NOW}, {{row}}.due_at) / 1000000",
    ),
    "sqlite": (
        "CAST(round((julianday('now') - 2440587.5) * 86400000) * 1000 AS INTEGER) + 1000",
        "round((julianday({row}.due_at) - julianday('now')) * 86400, 3)",
    ),
}


def _for_mysql(when: str, event: str, condition: str, note: str) -> str:
    """Return a trigger as MySQL knows it, with neither columns nor a condition of its own."""
    event, _, column = event.partition(" OF ")
    when = when.replace(f" OF {column} ", " ") if column else when
    asked = [condition.removeprefix("WHEN "), f"NOT (OLD.{column} <=> NEW.{column})"]
    changed = " AND ".join(asked) if column else "true"
    return f"{when} BEGIN IF {changed} THEN {note} END IF; END"


class Note(NamedTuple):
    """
    One note of the ledger.

    Attributes:
        at: The moment on the clock of the journals, ns.
        lease: The time left of the lease of its run, s.
        holder: The process that ran the task, or ran it last, as the row has it.
    """

    what: str
    task_id: str
    at: int
    lease: float
    holder: str


class Ledger:
    """
    The table.

    Args:
        alias: Alias of the database with the outbox.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def open(self) -> None:
        """Make the table, and the triggers that fill it."""
        vendor, table = connections[self._alias].vendor, OutboxMessage._meta.db_table
        moment, left = _CLOCKS[vendor]
        self._execute(_TABLE)
        self._execute("CREATE INDEX carried_what ON carried_ledger (what, task_id)")
        for what, (event, condition, row) in _TRIGGERS.items():
            when = f"CREATE TRIGGER carried_{what} AFTER {event} ON {table} FOR EACH ROW"
            note = (
                f"INSERT INTO carried_ledger VALUES ('{what}', {row}.task_id, {moment}, "
                f"{left.format(row=row)}, {row}.holder);"
            )
            if vendor == "sqlite":
                self._execute(f"{when} {condition} BEGIN {note} END")
                continue
            if vendor == "mysql":
                self._execute(_for_mysql(when, event, condition, note))
                continue
            self._execute(
                f"CREATE FUNCTION carried_{what}() RETURNS trigger LANGUAGE plpgsql "
                f"AS $$ BEGIN {note} RETURN NULL; END $$"
            )
            self._execute(f"{when} {condition} EXECUTE FUNCTION carried_{what}()")

    def record(self, task_id: str) -> None:
        """Note that the current transaction sends a task."""
        moment, _ = _CLOCKS[connections[self._alias].vendor]
        values = f"'{COMMITTED}', %s, {moment}, NULL, NULL"
        self._execute(f"INSERT INTO carried_ledger VALUES ({values})", task_id)

    def count(self, what: str) -> int:
        """Return how often this was noted."""
        ((number,),) = self._execute("SELECT count(*) FROM carried_ledger WHERE what = %s", what)
        return int(number)

    def has(self, what: str, task_id: str) -> bool:
        """Return whether this was noted of a task."""
        query = "SELECT 1 FROM carried_ledger WHERE what = %s AND task_id = %s"
        return bool(self._execute(query, what, task_id))

    def read(self) -> Iterator[Note]:
        """Yield all notes, in the order of their moments."""
        # Both clocks are of this machine, and go at the same speed.
        offset = time.time_ns() - time.monotonic_ns()
        rows = self._execute(
            "SELECT what, task_id, at, coalesce(lease, 0), coalesce(holder, '') "
            "FROM carried_ledger ORDER BY at"
        )
        for what, task_id, at, lease, holder in rows:
            yield Note(what, task_id, at * 1000 - offset, lease, holder)

    def _execute(self, statement: str, *values: str) -> list[Any]:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []
