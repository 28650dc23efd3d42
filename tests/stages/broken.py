"""
Engines that end a stage wrongly, which the tests of stages must notice.

Each patches the engine of this process alone. Their steps are claimed, recorded and sent as
ever; only who begins the next stage is decided by what looks right and is not.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from django.db import DatabaseError, connections, transaction

from django_celery_safe.databases import Now
from django_celery_safe.events import RUN_ENDED
from django_celery_safe.stages import Status, engine, step_messages
from django_celery_safe.stages.engine import Found, StepFollower, StepTable

logger = logging.getLogger(__name__)


#: Tells whether a step that was marked just now was the last of its run's stage.
IsLast = Callable[[StepTable, int, int], bool]


def use(name: str) -> None:
    """Let this process have an engine until it ends; without a name the right one."""
    if name:
        _end_stages_by(ENGINES[name])


def _end_stages_by(is_last: IsLast) -> None:
    last = threading.local()

    def is_stage_open(follower: StepFollower, found: Found) -> bool:
        last.stage = found.stage
        return not is_last(follower.table, found.run, found.stage)

    def leave(store: StepTable, pk: int, write: Callable[[], bool]) -> bool:
        # Without the run's lock, for which the right one waits.
        _go_on(store, pk, last.stage)
        return write()

    StepFollower._is_stage_open, engine.leave = is_stage_open, leave  # type: ignore[method-assign]


def _is_last_by_count(store: StepTable, run: int, stage: int) -> bool:
    """Return whether none of the stage's steps is left, as counted without the run's lock."""
    return not store.steps.filter(run=run, stage=stage).unfinished().exists()


def _is_last_by_counter(store: StepTable, run: int, stage: int) -> bool:
    """Return whether the counter of the stage's ended steps, raised by ``F() + 1``, is full."""
    place = [run, stage]
    is_mysql = connections[store.alias].vendor == "mysql"
    there = "ON DUPLICATE KEY UPDATE" if is_mysql else "ON CONFLICT (run, stage) DO UPDATE SET"
    with connections[store.alias].cursor() as cursor:
        try:
            cursor.execute(_RAISE.format(there), place)
        except DatabaseError:
            _make_counters(store.alias)
            cursor.execute(_RAISE.format(there), place)
        total = store.steps.filter(run=run, stage=stage).count()
        # Another step may have raised it, too, since: then both read the same.
        cursor.execute(_READ, place)
        return bool(cursor.fetchone() == (total,))


#: Who ends a stage, by the name of the engine.
ENGINES: Final[dict[str, IsLast]] = {"counter": _is_last_by_counter, "count": _is_last_by_count}

_RAISE: Final = (
    "INSERT INTO broken_counters (run, stage, ended) VALUES (%s, %s, 1) "
    "{} ended = broken_counters.ended + 1"
)
_READ: Final = "SELECT ended FROM broken_counters WHERE run = %s AND stage = %s"
_MAKE: Final = (
    "CREATE TABLE IF NOT EXISTS broken_counters "
    "(run bigint, stage integer, ended integer, PRIMARY KEY (run, stage))"
)


def _make_counters(alias: str) -> None:
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(_MAKE)
    except DatabaseError:
        # PostgreSQL refuses all but one of several that make it at the same time.
        logger.debug("The counters were made by another.")


def _go_on(store: StepTable, pk: int, stage: int) -> None:
    with transaction.atomic(using=store.alias):
        run = store.runs.get(pk=pk)
        if run.status in Status.STOPPED:
            return
        params = engine.encode_params(run, run.steps.filter(stage=stage))
        following = list(run.steps.filter(stage=stage + 1))
        changes: dict[str, Any] = {"params_text": params}
        if following:
            changes |= {"stage": stage + 1}
        else:
            changes |= {"status": Status.SUCCEEDED, "ended_at": Now()}
        store.runs.filter(pk=run.pk).update(**changes)
        step_messages.send(store, following)
    if not following:
        RUN_ENDED.emit(engine.start, run=run.pk, status=Status.SUCCEEDED.value, error="")
