"""
A table of the recorder's own, which the database itself fills.

Its triggers are part of the transactions that they watch: a killed process can't have
committed what is not noted here.
"""

from collections import Counter
from typing import Final

from django.db import connections

from django_celery_safe.models import OutboxMessage, StageStep

#: The two events: a message was written, and a step was recorded as succeeded.
MESSAGE: Final = "message"
SUCCESS: Final = "success"

_TABLE: Final = "CREATE TABLE runs_ledger (what varchar(8) NOT NULL, task_id varchar(36) NOT NULL)"


def _for_mysql(what: str, when: str, noted: str) -> str:
    """Return the trigger as MySQL knows it, with neither columns nor a condition of its own."""
    when, _, condition = when.replace(" OF status", "").partition(" WHEN ")
    changed = f"{condition} AND OLD.status <> NEW.status" if condition else "true"
    return f"CREATE TRIGGER runs_{what} {when} BEGIN IF {changed} THEN {noted} END IF; END"


class Ledger:
    """
    The table.

    Args:
        alias: Alias of the database with the runs.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias

    def open(self) -> None:
        """Make the table, and the triggers that fill it."""
        steps, messages = StageStep._meta.db_table, OutboxMessage._meta.db_table
        on_success = f"AFTER UPDATE OF status ON {steps} FOR EACH ROW WHEN (NEW.status='succeeded')"
        on_message = f"AFTER INSERT ON {messages} FOR EACH ROW"
        with connections[self._alias].cursor() as cursor:
            cursor.execute(_TABLE)
            for what, when in ((SUCCESS, on_success), (MESSAGE, on_message)):
                noted = f"INSERT INTO runs_ledger VALUES ('{what}', NEW.task_id);"
                if connections[self._alias].vendor == "sqlite":
                    cursor.execute(f"CREATE TRIGGER runs_{what} {when} BEGIN {noted} END")
                    continue
                if connections[self._alias].vendor == "mysql":
                    cursor.execute(_for_mysql(what, when, noted))
                    continue
                cursor.execute(
                    f"CREATE FUNCTION runs_{what}() RETURNS trigger LANGUAGE plpgsql "
                    f"AS $$ BEGIN {noted} RETURN NULL; END $$"
                )
                cursor.execute(f"CREATE TRIGGER runs_{what} {when} EXECUTE FUNCTION runs_{what}()")

    def read(self, what: str) -> Counter[str]:
        """Return how often it was noted of each task id."""
        with connections[self._alias].cursor() as cursor:
            cursor.execute(
                "SELECT task_id, count(*) FROM runs_ledger WHERE what = %s GROUP BY task_id", [what]
            )
            return Counter(dict(cursor.fetchall()))
