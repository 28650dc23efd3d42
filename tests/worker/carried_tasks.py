"""Tasks that are carried until done, for the workers of ``test_carried``."""

import os
import signal
from pathlib import Path
from typing import Any

from celery import shared_task
from celery.signals import after_task_publish, task_failure, worker_shutting_down
from django.db import transaction

from django_celery_safe import SafeTask, current_claim, resumable
from django_celery_safe.models import OutboxMessage
from tests.app.models import Person
from tests.processes import wait_for
from tests.worker.rooms import Room

CARRIED: dict[str, Any] = {"base": SafeTask, "bind": True, "outbox": "until_done"}


def enter(task: Any, room: str, alias: str) -> Room:
    """Note a run, and how many processes have died in its task; return the room."""
    place = Room(Path(room))
    rows = OutboxMessage.objects.using(alias)
    place.note("started", task, deaths=rows.get(task_id=task.request.id).deaths)
    return place


def wait(place: Room) -> None:
    """Wait until the gate of a room opens."""
    wait_for((place.folder / "gate").exists, 60)


@shared_task(**CARRIED)
def stay(self: Any, room: str, alias: str) -> None:
    """Stay in the room until its gate opens."""
    wait(enter(self, room, alias))


@task_failure.connect(sender=stay)
def note_failure(args: Any, exception: BaseException, task_id: str, **details: Any) -> None:
    """Note what receivers of Celery's signal get."""
    Room(Path(args[0])).journal.write("failed", id=task_id, error=type(exception).__name__)


@shared_task(**CARRIED, time_limit=3)
def stay_too_long(self: Any, room: str, alias: str) -> None:
    """Stay until the worker kills the process at the hard time limit."""
    wait(enter(self, room, alias))


@shared_task(**CARRIED, max_deaths=2)
def kill_itself(self: Any, room: str, alias: str) -> None:
    """Kill each process that runs it."""
    enter(self, room, alias)
    os.kill(os.getpid(), signal.SIGKILL)


@shared_task(**CARRIED)
def note(self: Any, room: str, alias: str, *parts: Any) -> str:
    """Note that it ran."""
    enter(self, room, alias)
    return "noted"


def write_once(task: Any, room: str, alias: str) -> None:
    """Write a row, and finish the task with it."""
    enter(task, room, alias)
    with transaction.atomic(using=alias):
        Person.everyone.using(alias).create()
        current_claim().finish()


@shared_task(**CARRIED)
def lead(self: Any, room: str, alias: str) -> None:
    """Write once; the process is killed when the message of ``trail`` has gone out."""
    write_once(self, room, alias)

    def die(**kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if len(Room(Path(room)).runs()) == 1:
        after_task_publish.connect(die, sender=trail.name, weak=False)


@shared_task(**CARRIED)
def trail(self: Any, room: str, alias: str) -> None:
    """Write once, after ``lead``."""
    write_once(self, room, alias)


@shared_task(**CARRIED)
def walk(self: Any, room: str, alias: str) -> None:
    """Write to each row, three in a chunk; stay at the fifth one until the gate opens."""
    place = enter(self, room, alias)
    for row in resumable(Person.everyone.using(alias), every=3):
        row.email += "x"
        row.save(update_fields=["email"])
        if row.pk == 5:
            place.note("there", self)
            wait(place)


@worker_shutting_down.connect
def note_shutdown(**kwargs: Any) -> None:
    """Note in the worker's log that its tasks have been told."""
    print("told to shut down", flush=True)
