"""The tasks of the project, each decorated as the neighbour wants it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
from celery import current_task, shared_task
from django.conf import settings
from django.utils.module_loading import import_string

from django_celery_safe import cache_lock, idempotent, single_instance, stages
from tests.company.neighbours import Neighbour
from tests.processes import Journal, wait_for

HERE: Neighbour = settings.HERE
FOLDER = Path(settings.SCENE["folder"])
JOURNAL = Journal(FOLDER / "journal")


def task(*ours: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Make a task of a function: our decorators, with those of the neighbour around them."""

    def decorate(function: Callable[..., Any]) -> Any:
        for decorator in (HERE.below, *ours, HERE.above):
            function = decorator(function)
        base = HERE.task_base and import_string(HERE.task_base)
        return shared_task(base=base, **options)(function)

    return decorate


def note(flow: str) -> str:
    """Write down that this message did its work, and what came with it from its sender."""
    JOURNAL.write("ran", flow=flow, id=current_task.request.id, brought=HERE.brought())
    return flow


def wait_at_gate(flow: str) -> str:
    """Wait until the gate of a flow opens."""
    JOURNAL.write("waits", flow=flow)
    wait_for((FOLDER / flow).exists, 60)
    return note(flow)


@task()
def plain(flow: str) -> str:
    """Do the work."""
    return note(flow)


@task()
def lock(flow: str) -> str:
    """Do the work under a lock."""
    with cache_lock(flow) as held:
        assert held
        return note(flow)


@task(single_instance(key="{flow}"))
def alone(flow: str) -> str:
    """Be skipped while another runs."""
    return wait_at_gate(flow)


@task(single_instance(key="{flow}", on_conflict="retry", retry_delay=0.5))
def patient(flow: str) -> str:
    """Come again while another runs."""
    return wait_at_gate(flow)


@task(single_instance(key="{flow}", unique_until="end"))
def unique(flow: str) -> str:
    """Be sent once until the end."""
    return wait_at_gate(flow)


@task(outbox="until_done")
def carried(flow: str) -> str:
    """Be carried until done."""
    return note(flow)


@task(outbox="until_done")
def killed(flow: str) -> str:
    """Kill its own process in its first run."""
    JOURNAL.write("started", flow=flow)
    if JOURNAL.count("started", flow=flow) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return note(flow)


@task(stages.step)
def step(flow: dict[str, Any]) -> None:
    """Be a step of a run with these params."""
    note(flow["flow"])


@task(idempotent(key="{flow}"))
def once(flow: str) -> str:
    """Be done once."""
    return note(flow)


@shared_task
def name_of(flow: str, row: Any) -> str:
    """Do the work for a row that comes as it is, which only a pickle can send."""
    assert row.pk
    return note(flow)


if django.VERSION >= (6,):
    from django.tasks import task as django_task

    @django_task
    def modern(flow: str) -> str:
        """Be a task of Django."""
        return note(flow)
