"""Tasks that are carried until done, for the workers of ``test_carried``."""

from pathlib import Path
from typing import Any

from celery import shared_task
from celery.signals import task_failure, worker_shutting_down

from django_celery_safe import SafeTask, resumable
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


@shared_task(**CARRIED)
def note(self: Any, room: str, alias: str, *parts: Any) -> str:
    """Note that it ran."""
    enter(self, room, alias)
    return "noted"


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
