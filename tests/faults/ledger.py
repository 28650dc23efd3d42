"""
A table of the recorder's own, which senders and the database itself fill.

Both write in the transactions that they watch. So a record is there if the transaction was
committed, even if its process was killed right after the commit.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

from django.db import connections

#: Moments are in µs since 1970; the time left of a lease, ``lease``, is in s.
_TABLE: Final = """
CREATE TABLE faults_ledger (
    what varchar(9) NOT NULL, task_id varchar(255) NOT NULL, at bigint NOT NULL,
    lease double precision NULL, holder text NULL
)
"""

#: The time in UTC at this very moment, as MySQL has it in a trigger, too.
_NOW: Final = "convert_tz(sysdate(6), @@session.time_zone, '+00:00')"

#: For each database, SQL for the current time in µs, and for the seconds until a row's ``due_at``.
_CLOCKS: Final = {
    "postgresql": (
        "(extract(epoch FROM clock_timestamp()) * 1000000)::bigint",
        "extract(epoch FROM {row}.due_at - clock_timestamp())",
    ),
    "mysql": (
        f"timestampdiff(MICROSECOND, '1970-01-01', {_NOW})",
        f"timestampdiff(MICROSECOND, {_NOW}, {{row}}.due_at) / 1000000",
    ),
}


class Trigger(NamedTuple):
    """
    What the database notes about the rows of a table.

    Attributes:
        event: INSERT, DELETE, or UPDATE of a column.
        row: The version of the row that is noted: OLD or NEW.
        has_lease: Whether the rows have a lease and a holder.
    """

    model: Any
    event: str
    condition: str = ""
    row: str = "NEW"
    has_lease: bool = True


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
        alias: Alias of the database with the rows that are watched.
    """

    def __init__(self, alias: str) -> None:
        self._alias, self._vendor = alias, connections[alias].vendor

    def open(self, triggers: Mapping[str, Trigger]) -> None:
        """Make the table, and the triggers that fill it, by the names of their notes."""
        moment, left = _CLOCKS[self._vendor]
        self._execute(_TABLE)
        self._execute("CREATE INDEX faults_what ON faults_ledger (what, task_id)")
        for what, one in triggers.items():
            lease = f"{left.format(row=one.row)}, {one.row}.holder"
            values = f"'{what}', {one.row}.task_id, {moment}, " + (
                lease if one.has_lease else "NULL, NULL"
            )
            note = f"INSERT INTO faults_ledger VALUES ({values});"
            event, _, column = one.event.partition(" OF ")
            table = one.model._meta.db_table
            name = f"CREATE TRIGGER faults_{what} AFTER"
            if self._vendor == "mysql":  # which has neither columns nor a condition
                changed = f"{one.condition} AND NOT (OLD.{column} <=> NEW.{column})"
                self._execute(
                    f"{name} {event} ON {table} FOR EACH ROW "
                    f"BEGIN IF {changed if column else 'true'} THEN {note} END IF; END"
                )
                continue
            when = f"WHEN ({one.condition})" if one.condition else ""
            self._execute(
                f"CREATE FUNCTION faults_{what}() RETURNS trigger LANGUAGE plpgsql "
                f"AS $$ BEGIN {note} RETURN NULL; END $$"
            )
            self._execute(
                f"{name} {one.event} ON {table} FOR EACH ROW {when} "
                f"EXECUTE FUNCTION faults_{what}()"
            )

    def record(self, what: str, task_id: str) -> None:
        """Note something of a task in the current transaction."""
        moment, _ = _CLOCKS[self._vendor]
        values = f"'{what}', %s, {moment}, NULL, NULL"
        self._execute(f"INSERT INTO faults_ledger VALUES ({values})", task_id)

    def count(self, what: str, task_id: str = "%") -> int:
        """Return how often this was noted, of one task or of all."""
        query = "SELECT count(*) FROM faults_ledger WHERE what = %s AND task_id LIKE %s"
        ((number,),) = self._execute(query, what, task_id)
        return int(number)

    def tally(self, what: str) -> Counter[str]:
        """Return how often it was noted of each task id."""
        return Counter(note.task_id for note in self.read() if note.what == what)

    def read(self) -> Iterator[Note]:
        """Yield all notes, in the order of their moments."""
        # Both clocks are of this machine, and go at the same speed.
        offset = time.time_ns() - time.monotonic_ns()
        rows = self._execute(
            "SELECT what, task_id, at, coalesce(lease, 0), coalesce(holder, '') "
            "FROM faults_ledger ORDER BY at"
        )
        for what, task_id, at, lease, holder in rows:
            yield Note(what, task_id, at * 1000 - offset, lease, holder)

    def _execute(self, statement: str, *values: str) -> list[Any]:
        with connections[self._alias].cursor() as cursor:
            cursor.execute(statement, values or None)
            return cursor.fetchall() if cursor.description else []
