"""
A table of the recorder's own, which the database itself fills.

Its triggers are part of the transactions that they watch: what they note was committed, and
when, whoever was killed right after that.
"""

import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from django.db import connections

from django_celery_safe.models import OutboxMessage

#: The notes about a task's row: it was written, it is gone, its task failed, a process died in
#: its task, and it is sent again since no worker began its task.
WRITTEN: Final = "written"
GONE: Final = "gone"
FAILED: Final = "failed"
DEATH: Final = "death"
RESENT: Final = "resent"

_TABLE: Final = """
CREATE TABLE carried_ledger (
    what varchar(8) NOT NULL, task_id text NOT NULL, at timestamptz NOT NULL,
    lease interval NULL, holder text NULL
)
"""

#: When each is noted, and the row of which that is.
_TRIGGERS: Final = {
    WRITTEN: ("AFTER INSERT ON {table} FOR EACH ROW", "NEW"),
    GONE: ("AFTER DELETE ON {table} FOR EACH ROW", "OLD"),
    FAILED: ("AFTER UPDATE OF ended_at ON {table} FOR EACH ROW WHEN (OLD.ended_at IS NULL)", "OLD"),
    RESENT: (
        "AFTER UPDATE OF resent ON {table} FOR EACH ROW WHEN (NEW.resent > OLD.resent)",
        "OLD",
    ),
    DEATH: (
        "AFTER UPDATE OF deaths ON {table} FOR EACH ROW WHEN (NEW.deaths > OLD.deaths)",
        "OLD",
    ),
}


class Note(NamedTuple):
    """
    One note of the ledger.

    Attributes:
        at: When, on the clock of the journals, ns.
        lease: What was left of the lease of its run, s.
        holder: Who ran the task, or ran it last, as the row has it.
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
        alias: Alias of the PostgreSQL database with the outbox.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def open(self) -> None:
        """Make the table, and the triggers that fill it."""
        table = OutboxMessage._meta.db_table
        with connections[self._alias].cursor() as cursor:
            cursor.execute(_TABLE)
            for what, (when, row) in _TRIGGERS.items():
                cursor.execute(
                    f"CREATE FUNCTION carried_{what}() RETURNS trigger LANGUAGE plpgsql AS $$ "
                    f"BEGIN INSERT INTO carried_ledger VALUES ('{what}', {row}.task_id, "
                    f"clock_timestamp(), {row}.due_at - clock_timestamp(), {row}.holder); "
                    f"RETURN NULL; END $$"
                )
                cursor.execute(
                    f"CREATE TRIGGER carried_{what} {when.format(table=table)} "
                    f"EXECUTE FUNCTION carried_{what}()"
                )

    def count(self, what: str) -> int:
        """Return how often this was noted."""
        with connections[self._alias].cursor() as cursor:
            cursor.execute("SELECT count(*) FROM carried_ledger WHERE what = %s", [what])
            return int(cursor.fetchone()[0])

    def read(self) -> Iterator[Note]:
        """Yield all notes, in the order of their moments."""
        # Both clocks are of this machine, and go at the same speed.
        offset = time.time_ns() - time.monotonic_ns()
        with connections[self._alias].cursor() as cursor:
            cursor.execute(
                "SELECT what, task_id, (extract(epoch FROM at) * 1000000)::bigint * 1000, "
                "coalesce(extract(epoch FROM lease), 0)::float, coalesce(holder, '') "
                "FROM carried_ledger ORDER BY at"
            )
            for what, task_id, at, lease, holder in cursor.fetchall():
                yield Note(what, task_id, at - offset, lease, holder)
