"""
Tasks of ``test_events``, each sent once for a room until it ends.

Each run stays in its room until the gate with the run's number opens, and then ends
as it was told when it was sent.
"""

from collections.abc import Mapping
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


def make_task(name: str, lock: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """
    Make a task that acts as it is told.

    Args:
        lock: More options of ``single_instance``.
        options: Options of ``shared_task``.
    """
    guarded = single_instance(key="{room}", unique_until="end", **(lock or {}))(act)
    return shared_task(name=f"events.{name}", bind=True, base=Strict, **options)(guarded)


#: As most tasks are.
noted = make_task("noted")
#: Runs under a short lease.
leased_briefly = make_task("leased_briefly", {"timeout": SHORT_LEASE})
#: Is acknowledged after its run.
late = make_task("late", acks_late=True)
#: Runs again in another worker if its own ends; the lease is long enough to see that.
taken_over = make_task("taken_over", {"timeout": TAKEOVER}, acks_late=True)
#: Is not acknowledged if its run fails.
unacknowledged = make_task("unacknowledged", acks_late=True, acks_on_failure_or_timeout=False)
#: Runs again if its process dies.
surviving = make_task(
    "surviving", {"timeout": TAKEOVER}, acks_late=True, reject_on_worker_lost=True
)
#: Is sent again by Celery if its process dies.
lost = make_task("lost", {"timeout": TAKEOVER}, retry_on_worker_lost=True, default_retry_delay=1)
#: Is retried once, at once, by Celery itself.
autoretried = make_task(
    "autoretried", autoretry_for=(KeyError,), default_retry_delay=0, max_retries=1
)
