"""The tables of runs and steps."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django.apps import apps
from django.db import router

from ..databases import refuse_untested

if TYPE_CHECKING:
    from ..models.stage_states import StageRuns, StageSteps

#: The models of the tables.
MODELS: Final = ("StageRun", "StageStep", "OutboxMessage")
#: The fields of a step that one stage hands over to the next, in the order of the model.
HANDED_OVER: Final = (
    "id", "run_id", "stage", "task", "arguments_text", "task_id", "params_text",
)  # fmt: skip


class Found(NamedTuple):
    """The columns of a step and of its run that the step's message needs."""

    status: str
    run: int
    stage: int
    arguments: str
    run_status: str
    params: str


#: The same columns, as the ORM names them.
FOUND: Final = ("status", "run_id", "stage", "arguments_text", "run__status", "run__params_text")


class StepTable:
    """The runs and steps in one database, and the outbox that carries them; see ``table_in``."""

    #: Managers, which have the methods of these querysets.
    runs: StageRuns
    steps: StageSteps
    messages: Any

    def __init__(self, alias: str) -> None:
        refuse_untested(alias, "hold runs of stages")
        self.alias = alias
        managers = [_model(name).objects.db_manager(alias) for name in MODELS]
        self.runs, self.steps, self.messages = managers

    def at(self, pk: int, task_id: str) -> StageSteps:
        """Return a queryset of the step that messages with this task id run: one row or none."""
        return self.steps.filter(pk=pk, task_id=task_id)


def _model(name: str) -> Any:
    return apps.get_model("django_celery_safe", name)


def step_table() -> StepTable:
    """Return the runs and steps in the database to which the router writes them."""
    return table_in(router.db_for_write(_model("StageRun")))


#: Returns the table in the database with this alias.
table_in = lru_cache(StepTable)
