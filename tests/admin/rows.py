"""Rows of each kind for the admin to show, and locks, in each state that they can have."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, Final

from django.db import router

from django_celery_safe import send_on_commit, stages
from django_celery_safe.databases import Now
from django_celery_safe.leases.holder import Holder, encode_holder, plain_name
from django_celery_safe.models import IdempotencyRecord, OutboxMessage, StageRun, StageStep
from django_celery_safe.sending.followed import Fault
from django_celery_safe.stages import Status
from tests.app.tasks import add
from tests.locks.renewals import take_lock
from tests.sending.conftest import dying_sender
from tests.stages.tasks import note

#: An argument that shows only where arguments may.
SECRET: Final = "the-secret-of-the-argument"
#: A lease that no test outlasts, and one that is over, s.
LEASE: Final = 600
OVER: Final = -60
#: The holder, unless a test names another one.
HOLDER: Final = Holder("web1", 42, 1_700_000_000.0, True, "shop.tasks.sell", "id-1", "(7,)", 600.0)


def write_alias() -> str:
    """Return where rows are written."""
    return router.db_for_write(OutboxMessage)


# Locks


def hold(name: str, holder: Holder = HOLDER, seconds: float = LEASE) -> str:
    """Have somebody hold a lock; return the token."""
    token = os.urandom(16).hex()
    take_lock(name, token, seconds, holder)
    return token


# The outbox


def leave(alias: str | None = None, task: Any = add, **changes: Any) -> OutboxMessage:
    """Let a message be there that was not sent yet; ``changes`` are made to its row."""
    alias = write_alias() if alias is None else alias
    with dying_sender(alias):
        send_on_commit(task.s(SECRET), using=alias, outbox=True)
    rows = OutboxMessage.objects.using(alias)
    pk = rows.latest("pk").pk
    rows.filter(pk=pk).update(**changes)
    return rows.get(pk=pk)


def leave_failed() -> None:
    """Let a message be there that could not be sent, and is to be tried again."""
    assert not leave().fail("no route to host", attempts=9)


def leave_dead(
    alias: str | None = None, error: str = "no route to host", **left: Any
) -> OutboxMessage:
    """Let a message be there that failed too often."""
    row = leave(alias, **left)
    assert row.fail(error, attempts=1)
    return row


def leave_sent(alias: str | None = None) -> OutboxMessage:
    """Let a message be there that was sent."""
    return leave(alias, state="sent", due_at=None, sent_at=Now())


# Records


def record(
    key: str, state: str = "done", lease: float = OVER, holder: Holder = HOLDER, **changes: Any
) -> IdempotencyRecord:
    """Let a record be there; with a lease above 0 and "running" somebody works on it."""
    rows = IdempotencyRecord.objects.using(write_alias())
    rows.create(
        key=plain_name(key),
        state=state,
        token=os.urandom(16).hex(),
        ends_at=Now() + timedelta(seconds=lease),
        holder=encode_holder(key, holder),
        claimed_at=Now() - timedelta(seconds=90),
        **changes,
    )
    return rows.get(pk=plain_name(key))


# Runs


def begin(*sizes: int, params: dict[str, Any] | None = None, **labels: str) -> StageRun:
    """Start a run of so many stages, with so many steps each; nothing of it is sent."""
    alias = write_alias()
    plan = [(note, -n, {"name": SECRET}) for n, size in enumerate(sizes) for _ in range(size)]
    with dying_sender(alias):
        return stages.start(plan, params=params, **labels)


def end(run: StageRun, status: Status, **changes: Any) -> StageRun:
    """Let a run have ended so; if it failed, its first step failed."""
    alias = run._state.db
    steps = StageStep.objects.using(alias).filter(run=run)
    if status == Status.FAILED:
        first = steps.order_by("stage", "position").first()
        steps.filter(pk=first.pk).record(Status.FAILED, Fault("ValueError", "it does not work"))
        steps.filter(status=Status.WAITING).update(status=Status.ABORTED, ended_at=Now())
    StageRun.objects.using(alias).filter(pk=run.pk).update(status=status, ended_at=Now(), **changes)
    run.refresh_from_db(using=alias)
    return run


def work_on(
    run: StageRun, lease: float = LEASE, holder: Holder = HOLDER, number: int = 0
) -> StageStep:
    """Let a worker have begun a run's step; with a lease below 0 it died since."""
    rows = StageStep.objects.using(run._state.db).filter(run=run)
    step = rows.order_by("stage", "position")[number]
    rows.filter(pk=step.pk).update(status=Status.RUNNING, started_at=Now())
    OutboxMessage.objects.using(run._state.db).carried(step.task_id).update(
        state="running",
        token=os.urandom(16).hex(),
        due_at=Now() + timedelta(seconds=lease),
        starts=1,
        holder=encode_holder(str(step), holder),
    )
    StageRun.objects.using(run._state.db).filter(pk=run.pk).update(status=Status.RUNNING)
    return rows.listed().get(pk=step.pk)
