"""Tasks of Django, for the tests and their workers."""

import os
from pathlib import Path
from typing import Any

from celery import current_task
from django.tasks import TaskContext, task

from django_celery_safe import current_claim, single_instance
from tests.processes import Journal, wait_for

Context = TaskContext


@task
def add(x: int, y: int = 0) -> int:
    """Return the sum."""
    return x + y


def double(number: int) -> int:
    """Return twice a number; a task only where a test makes it one."""
    return number * 2


@task
async def add_async(x: int, y: int = 0) -> int:
    """Return the sum."""
    return x + y


class Declined(Exception):
    """An error of our own."""


@task
def decline(text: str) -> None:
    """Fail with an error of our own."""
    raise Declined(text)


@task
def return_long(length: int) -> str:
    """Return a long text."""
    return "x" * length


@task(takes_context=True)
def describe_context(context: Context, room: str) -> list[Any]:
    """Return what the context says."""
    result = context.task_result
    return [
        context.attempt,
        result.id,
        result.status,
        result.task.queue_name,
        result.worker_ids,
        result.enqueued_at is not None and result.started_at is not None,
    ]


@task(takes_context=True)
def stay(context: Context, room: str) -> int:
    """Note the run, and stay until the gate of the room opens."""
    folder = Path(room)
    result = context.task_result
    Journal(folder / "journal").write("ran", id=result.id, attempt=context.attempt, pid=os.getpid())
    wait_for((folder / "gate").exists, 60)
    return context.attempt


#: The attempts of ``try_again`` in this process.
attempts: list[int] = []


@task(takes_context=True)
def try_again(context: Context, times: int) -> list[int]:
    """Be retried by Celery so many times; return the attempts."""
    attempts.append(context.attempt)
    if current_task.request.retries < times:
        raise current_task.retry(countdown=1)
    return attempts


@task(takes_context=True)
@single_instance(key="{room}", on_conflict="retry", retry_delay=0.2)
def alone(context: Context, room: str, name: str) -> int:
    """Be the only one in a room."""
    return context.attempt


@task
@single_instance(unique_until="start")
def once_in_queue(name: str) -> str:
    """Be enqueued once until it starts."""
    return name


@task
def finish(value: int, returned: int) -> int:
    """Say itself what the work came to."""
    current_claim().finish(value)
    return returned
