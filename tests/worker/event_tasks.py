"""
Tasks of ``test_events``, each sent once for a room until it ends.

Each run stays in its room until the gate with the run's number opens, and then ends
as it was told when it was sent.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery import shared_task
from celery.exceptions import Ignore, Reject

from django_celery_safe import SafeTask, single_instance
from tests.processes import wait_for
from tests.worker.rooms import Room

#: Countdown of a retry that is not to come while the test looks, s.
COUNTDOWN = 600
#: A lease that a test can outwait, s.
SHORT_LEASE = 4
#: A lease that outlives the time in which a dead run's message is delivered again, s.
TAKEOVER = 8


class Strict(SafeTask):
    """A task class whose hook may fail before a run."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Fail if the run is told to."""
        if args[1] == "fail before the start":
            raise KeyError(args[1])


def make_task(
    lock: dict[str, Any] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Any]:
    """
    Make a task of a function.

    Args:
        lock: More options of ``single_instance``.
        options: Options of ``shared_task``.
    """

    def make(function: Callable[..., Any]) -> Any:
        guarded = single_instance(key="{room}", **{"unique_until": "end", **(lock or {})})(function)
        return shared_task(**{"bind": True, "base": Strict, **options})(guarded)

    return make


def act(task: Any, room: str, how: str) -> None:
    """Stay in the room until the gate of this run opens, then end in the way named."""
    place = Room(Path(room))
    with place.entered(task):
        number = len(place.runs())
        wait_for((place.folder / f"gate {number}").exists, 60)
        match how, number:
            case "fail", _:
                raise KeyError(how)
            case "exit", _:
                raise SystemExit(how)
            case "ignore", 1:
                raise Ignore(how)
            case "reject", 1:
                raise Reject(how, requeue=False)
            case "requeue", 1:
                raise Reject(how, requeue=True)
            case "retry", 1:
                raise task.retry(countdown=COUNTDOWN)
            case "retry now", 1:
                raise task.retry(countdown=0)
            case "replace by itself", 1:
                raise task.replace(task.si(room, how))


@make_task()
def noted(self: Any, room: str, how: str) -> None:
    """Run as most tasks do."""
    act(self, room, how)


@make_task({"timeout": SHORT_LEASE})
def leased_briefly(self: Any, room: str, how: str) -> None:
    """Run under a short lease."""
    act(self, room, how)


@make_task(acks_late=True)
def late(self: Any, room: str, how: str) -> None:
    """Run, and be acknowledged afterwards."""
    act(self, room, how)


@make_task({"timeout": TAKEOVER}, acks_late=True)
def taken_over(self: Any, room: str, how: str) -> None:
    """Run again in another worker if its own ends; the lease is long enough to see that."""
    act(self, room, how)


@make_task(acks_late=True, acks_on_failure_or_timeout=False)
def unacknowledged(self: Any, room: str, how: str) -> None:
    """Run, and not be acknowledged if that fails."""
    act(self, room, how)


@make_task({"timeout": TAKEOVER}, acks_late=True, reject_on_worker_lost=True)
def surviving(self: Any, room: str, how: str) -> None:
    """Run again if the process dies."""
    act(self, room, how)


@make_task({"timeout": TAKEOVER}, retry_on_worker_lost=True, default_retry_delay=1)
def lost(self: Any, room: str, how: str) -> None:
    """Be sent again by Celery if the process dies."""
    act(self, room, how)


@make_task(autoretry_for=(KeyError,), default_retry_delay=0, max_retries=1)
def autoretried(self: Any, room: str, how: str) -> None:
    """Be retried once, at once, by Celery itself."""
    act(self, room, how)
