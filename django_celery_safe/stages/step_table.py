"""The tables of runs and steps, and the statements that each step executes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.apps import apps
from django.db import connections, router

from .. import conf
from ..databases import MYSQL, refuse_untested
from ..exceptions import ConfigurationError
from ..sending.followed import Held
from ..sending.housekeeping import add_pruning
from ..transactions import lacks_table

if TYPE_CHECKING:
    from ..models.stages import StageRuns
    from ..models.step_states import StageSteps

#: Steps that one statement adds or changes; every database accepts that many parameters.
BATCH: Final = 500
#: Runs that a relay deletes in one turn at most, each with its steps in a transaction.
MOST_RUNS: Final = 100
#: The models of the tables.
MODELS: Final = ("StageRun", "StageStep", "OutboxMessage")

NOW: Final = {
    "postgresql": "STATEMENT_TIMESTAMP()",
    "sqlite": "STRFTIME('%%Y-%%m-%%d %%H:%%M:%%f', 'NOW')",
    MYSQL: "UTC_TIMESTAMP(6)",
}
BEGIN: Final = """
UPDATE {step} SET status = 'running', started_at = {now}
WHERE id = %s AND task_id = %s AND status IN ('waiting', 'running')
"""
#: What a begun step needs, which MySQL's UPDATE can't return.
RETURNING: Final = """
RETURNING status, run_id, stage, arguments,
(SELECT r.status FROM {run} r WHERE r.id = {step}.run_id),
(SELECT r.params FROM {run} r WHERE r.id = {step}.run_id)
"""
FIND: Final = """
SELECT s.status, s.run_id, s.stage, s.arguments, r.status, r.params
FROM {step} s JOIN {run} r ON r.id = s.run_id WHERE s.id = %s AND s.task_id = %s
"""
SUCCEED: Final = """
UPDATE {step} SET status = 'succeeded', params = %s, ended_at = {now},
error_type = '', error = '', traceback = ''
WHERE id = %s AND task_id = %s AND status = 'running'
"""
IF_HELD: Final = "AND EXISTS (SELECT 1 FROM {message} WHERE attempt = %s AND token = %s)"
BEGIN_RUN: Final = "UPDATE {run} SET status = 'running' WHERE id = %s AND status = 'waiting'"
BEGIN_STAGE: Final = "UPDATE {run} SET stage = %s, params = %s WHERE id = %s"
FIND_UNFINISHED: Final = """
SELECT id FROM {step} WHERE run_id = %s AND stage = %s AND status <> 'succeeded' LIMIT 1
"""
#: The steps of a stage and of the next one; none if a step of the former is unfinished.
HAND_OVER: Final = """
SELECT id, run_id, stage, task, task_id, arguments, params FROM {step}
WHERE run_id = %s AND stage IN (%s, %s) AND NOT EXISTS
(SELECT 1 FROM {step} u WHERE u.run_id = %s AND u.stage = %s AND u.status <> 'succeeded')
ORDER BY stage, position
"""


class Found(NamedTuple):
    """What a message needs of its step, and of the step's run."""

    status: str
    run: int
    stage: int
    arguments: str
    run_status: str
    params: str


class Step(NamedTuple):
    """A step as one stage hands over to the next, like its row."""

    pk: int
    run_id: int
    stage: int
    task: str
    task_id: str
    arguments_text: str
    params_text: str

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


class StepTable:
    """The runs and steps in one database; see ``table_in``."""

    def __init__(self, alias: str) -> None:
        refuse_untested(alias, "hold runs of stages")
        self.alias = alias

    def runs(self) -> StageRuns:
        """Return the runs."""
        rows: StageRuns = _model("StageRun").objects.using(self.alias)
        return rows

    def steps(self) -> StageSteps:
        """Return the steps."""
        rows: StageSteps = _model("StageStep").objects.using(self.alias)
        return rows

    def at(self, pk: int, task_id: str) -> StageSteps:
        """Return a queryset of the step that messages with this task id run: one row or none."""
        return self.steps().filter(pk=pk, task_id=task_id)

    def messages(self) -> Any:
        """Return the messages of the outbox that has those of the steps."""
        return _model("OutboxMessage").objects.using(self.alias)

    def check_migrated(self, error: Exception) -> None:
        """
        Raise an error that explains a database error, if a missing table caused it.

        Raises:
            ConfigurationError: A table is missing.
        """
        if lacks_table(self.alias, *map(_model, MODELS)):
            raise ConfigurationError(
                f'DATABASES["{self.alias}"] is to hold runs of stages and their outbox, and has no '
                f"table for that. Run: manage.py migrate django_celery_safe --database={self.alias}"
            ) from error

    def begin(self, pk: int, task_id: str) -> Found | None:
        """Set a step to running, unless it has ended, and return it; None: there is no such."""
        ids = [pk, task_id]
        if connections[self.alias].vendor == MYSQL:
            self._execute(BEGIN, ids)
            rows = self._find(FIND, ids)
        else:
            rows = self._find(BEGIN + RETURNING, ids) or self._find(FIND, ids)
        return Found(*rows[0]) if rows else None

    def begin_run(self, pk: int) -> None:
        """Record that the first step of a run has started."""
        self._execute(BEGIN_RUN, [pk])

    def begin_stage(self, run: int, stage: int, params: str) -> None:
        """Record the next stage of a locked run, and the params that it gets."""
        self._execute(BEGIN_STAGE, [stage, params, run])

    def succeed(self, pk: int, task_id: str, params: str, held: Held | None) -> None:
        """
        Record that a running step has succeeded.

        Args:
            held: The attempt and the token of the claim that must still hold its message; None:
                it has none, in eager mode.
        """
        text = SUCCEED if held is None else SUCCEED + IF_HELD
        self._execute(text, [params, pk, task_id, *(held or ())])

    def is_complete(self, run: int, stage: int) -> bool:
        """Return whether all steps of a stage have succeeded."""
        return not self._find(FIND_UNFINISHED, [run, stage])

    def hand_over(self, run: int, stage: int) -> list[Step]:
        """Return the steps of a complete stage and of the next one; []: it is not complete."""
        return [Step(*row) for row in self._find(HAND_OVER, [run, stage, stage + 1, run, stage])]

    def _execute(self, text: str, params: list[Any]) -> None:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(_prepare(self.alias, text), params)

    def _find(self, text: str, params: list[Any]) -> list[tuple[Any, ...]]:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(_prepare(self.alias, text), params)
            return list(cursor.fetchall())


def _model(name: str) -> Any:
    return apps.get_model("django_celery_safe", name)


@lru_cache
def _prepare(alias: str, text: str) -> str:
    """Return a statement as a database gets it."""
    connection = connections[alias]
    names = dict(zip(("run", "step", "message"), MODELS, strict=True))
    tables = {
        name: connection.ops.quote_name(_model(model)._meta.db_table)
        for name, model in names.items()
    }
    return " ".join(text.format(now=NOW[connection.vendor], **tables).split())


def step_table() -> StepTable:
    """Return the runs and steps in the database to which the router writes them."""
    return table_in(router.db_for_write(_model("StageRun")))


#: Returns the table in the database with this alias.
table_in = lru_cache(StepTable)


def connect() -> None:
    """Let relays delete runs that ended long ago."""
    add_pruning("runs of stages", MODELS, get_prunable, most=MOST_RUNS, batch=1)


def get_prunable(alias: str) -> list[StageRuns]:
    """Return a queryset of the runs whose retention has expired."""
    age, runs = conf.retention("runs"), table_in(alias).runs()
    return [] if age is None else [runs.older(age).unprotected().order_by("ended_at")]
