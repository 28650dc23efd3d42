"""
Tasks of ``test_events``: three of each kind, one for each ``unique_until``.

Each run stays in its room until the gate with the run's number opens, and then ends
as it was told when it was sent.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from celery import shared_task
from celery.exceptions import Ignore, Reject
from pydantic import BaseModel

from django_celery_safe import SafeTask, single_instance
from tests.app.celery import app
from tests.app.tasks import add
from tests.processes import wait_for
from tests.worker.rooms import Room

#: The three columns of each row.
UNTIL = (None, "start", "end")

#: Hooks of Celery that a task class can have.
HOOKS = ("before_start", "on_success", "on_retry", "on_failure", "after_return")

#: Countdown of a retry that is not to come while the test looks, s.
COUNTDOWN = 600
#: A lease that a test can outwait, s.
SHORT_LEASE = 4
#: A lease that outlives the time in which a dead run's message is delivered again, s.
TAKEOVER = 8


class Kind(NamedTuple):
    """The tasks of one kind, by their ``unique_until``, and the cache with their locks."""

    tasks: dict[str | None, Any]
    cache: str | None


class Noted(SafeTask):
    """A task class with each of Celery's hooks, which notes that it was called."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Note it; fail if the run is told to."""
        _note(self, "before_start", args)
        if args[1] == "fail before the start":
            raise KeyError(args[1])

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Note it."""
        _note(self, "on_success", args)

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Note it."""
        _note(self, "on_retry", args)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        """Note it."""
        _note(self, "on_failure", args)

    def after_return(self, status: Any, retval: Any, *more: Any) -> None:
        """Note it."""
        _note(self, "after_return", more[1])


def _note(task: Any, hook: str, args: Any) -> None:
    Room(Path(args[0])).note(hook, task)


def for_each(
    lock: dict[str, Any] | None = None, **options: Any
) -> Callable[[Callable[..., Any]], Kind]:
    """
    Make a task of a function for each ``unique_until``.

    Args:
        lock: More options of ``single_instance``.
        options: Options of ``shared_task``.
    """
    lock = lock or {}

    def make(function: Callable[..., Any]) -> Kind:
        tasks = {}
        for until in UNTIL:
            guarded = single_instance(key="{room}", unique_until=until, **lock)(function)
            name = f"{function.__module__}.{function.__name__}_{until}"
            kept: Any = {"name": name, "bind": True, "base": Noted, **options}
            tasks[until] = shared_task(**kept)(guarded)
        return Kind(tasks, lock.get("cache"))

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
            case "retry until it fails", _:
                raise task.retry(countdown=0, exc=KeyError(how))
            case "fail once", 1:
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
            case "replace", 1:
                raise task.replace(add.si(1, 2))
            case "replace by itself", 1:
                raise task.replace(task.si(room, how))


@for_each()
def noted(self: Any, room: str, how: str) -> None:
    """Run as most tasks do."""
    act(self, room, how)


@for_each(max_retries=1)
def retried_once(self: Any, room: str, how: str) -> None:
    """Run, and be retried once at most."""
    act(self, room, how)


@for_each({"timeout": SHORT_LEASE})
def leased_briefly(self: Any, room: str, how: str) -> None:
    """Run under a short lease."""
    act(self, room, how)


@for_each(acks_late=True)
def late(self: Any, room: str, how: str) -> None:
    """Run, and be acknowledged afterwards."""
    act(self, room, how)


@for_each({"timeout": TAKEOVER}, acks_late=True)
def taken_over(self: Any, room: str, how: str) -> None:
    """Run again in another worker if its own ends; the lease is long enough to see that."""
    act(self, room, how)


@for_each(acks_late=True, acks_on_failure_or_timeout=False)
def unacknowledged(self: Any, room: str, how: str) -> None:
    """Run, and not be acknowledged if that fails."""
    act(self, room, how)


@for_each({"timeout": TAKEOVER}, acks_late=True, reject_on_worker_lost=True)
def surviving(self: Any, room: str, how: str) -> None:
    """Run again if the process dies."""
    act(self, room, how)


@for_each(autoretry_for=(KeyError,), default_retry_delay=0, max_retries=1)
def autoretried(self: Any, room: str, how: str) -> None:
    """Be retried once, at once, by Celery itself."""
    act(self, room, how)


@for_each(autoretry_for=(KeyError,), default_retry_delay=COUNTDOWN)
def autoretried_later(self: Any, room: str, how: str) -> None:
    """Be retried later by Celery itself."""
    act(self, room, how)


@for_each({"cache": "frail"})
def frail(self: Any, room: str, how: str) -> None:
    """Run under a lock in the cache that a test can stop."""
    act(self, room, how)


class Order(BaseModel):
    """An argument that pydantic checks in the worker."""

    number: int


@for_each(pydantic=True)
def modelled(self: Any, room: str, how: str, order: Order) -> None:
    """Run with a model."""
    assert isinstance(order, Order)
    act(self, room, how)


def _make_class_based(until: str | None) -> Any:
    class ClassBased(Noted):
        name = f"{__name__}.class_based_{until}"

        @single_instance(key="{room}", unique_until=until)
        def run(self, room: str, how: str) -> None:
            """Run as a method of the task's class."""
            act(self, room, how)

    return app.register_task(ClassBased())


class_based = Kind({until: _make_class_based(until) for until in UNTIL}, None)
