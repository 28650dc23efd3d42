"""Running ``on_commit`` callbacks inside a TestCase, and asserting what is sent on commit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any
from unittest import mock

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from ..concurrency.keys import to_wire
from ..sending import commit as sending_on_commit
from ..sending import task as safe_task
from ..texts import get_logger
from ..transactions import in_testcase_only
from .messages import Sent, check_task, committing_now, kept_from_broker, outbox_held, shown

logger = get_logger(__name__)


@contextmanager
def on_commit_now() -> Iterator[None]:
    """
    Run ``on_commit`` callbacks as if the code were not inside a TestCase.

    Inside ``TestCase`` (and pytest-django's ``db``) nothing is ever committed, so
    messages sent on commit never go out. In this block, callbacks run at the end of
    the outermost ``atomic()`` of the code under test, or at once outside one. A
    rollback still drops callbacks, and callbacks from before the block keep waiting.
    Messages of the outbox stay there for ``drain_outbox``, whether or not a broker answers.
    """
    with outbox_held(), commits_now():
        yield


@contextmanager
def commits_now() -> Iterator[None]:
    """Do what :func:`on_commit_now` does, and publish the messages of the outbox."""
    on_commit, leave = BaseDatabaseWrapper.on_commit, transaction.Atomic.__exit__
    if hasattr(leave, "celery_safe"):
        yield  # inside another block of this kind
        return

    def on_commit_or_now(
        self: BaseDatabaseWrapper, func: Callable[[], object], robust: bool = False
    ) -> None:
        # A coroutine has a connection of its own, which Django may not open there.
        is_unused = self.connection is None and not self.in_atomic_block
        if is_unused or in_testcase_only(self.alias):
            _run(func, robust)
        else:
            on_commit(self, func, robust)

    def leave_and_run(self: transaction.Atomic, *error: Any) -> None:
        leave(self, *error)
        connection = transaction.get_connection(self.using)
        if in_testcase_only(connection.alias):
            _run_callbacks(connection)

    leave_and_run.celery_safe = True  # type: ignore[attr-defined]
    with (
        _set_aside(),
        mock.patch.object(BaseDatabaseWrapper, "on_commit", on_commit_or_now),
        mock.patch.object(transaction.Atomic, "__exit__", leave_and_run),
    ):
        yield


@contextmanager
def _set_aside() -> Iterator[None]:
    """Set aside callbacks that already wait for a commit, which a TestCase never makes."""
    opened = connections.all(initialized_only=True)
    before = [(one, one.run_on_commit) for one in opened if in_testcase_only(one.alias)]
    for connection, _ in before:
        connection.run_on_commit = []
    try:
        yield
    finally:
        for connection, waiting in before:
            connection.run_on_commit = [*waiting, *connection.run_on_commit]


def _run_callbacks(connection: Any) -> None:
    waiting, connection.run_on_commit = connection.run_on_commit, []
    for _, callback, robust in waiting:
        _run(callback, robust)


def _run(callback: Callable[[], object], robust: bool) -> None:
    try:
        callback()
    except Exception as error:
        if not robust:
            raise
        logger.error("A robust on_commit callback raised.", exc_info=error)


def waiting_for_commit(using: str = DEFAULT_DB_ALIAS) -> int:
    """Return how many callbacks wait for a commit of the database ``using``."""
    return len(connections[using].run_on_commit)


@contextmanager
def assert_sent_on_commit(
    task: Any, /, *args: Any, times: int = 1, **kwargs: Any
) -> Iterator[list[Sent]]:
    """
    Fail unless the block sends a task, with these arguments, when its transaction commits.

    A plain ``.delay()`` fails, even without an open transaction, because a caller may open one.
    The block may also send other tasks, or this task with other arguments. Inside the block no
    task is published or run, not even eagerly, and ``on_commit`` callbacks run as in
    :func:`on_commit_now`.

    Args:
        args, kwargs: Compared as they arrive at a worker: a tuple equals a list, and defaults
            are filled in. ``unittest.mock.ANY`` equals any value.
        times: How many times the task must be sent; 0: never, neither on commit nor before it.
            0 without arguments: never, whatever the arguments.

    Returns:
        Every message that the block sends, of any task, in order. For a canvas these are the
        messages sent at once: the first task of a chain, each of a group, the header of a chord.

    Raises:
        AssertionError: The task was not sent like this. The error lists the messages that were
            sent instead.
        TypeError: The arguments don't fit the task, so it can never be sent with them.
    """
    check_task(task, "assert_sent_on_commit")
    any_call = times == 0 and not args and not kwargs
    wanted = None if any_call else _wanted(task, args, kwargs)
    with kept_from_broker(task.app) as sent, commits_now(), _watching_commits() as commits:
        yield sent
        others = commits.describe()
    same = [
        one
        for one in sent
        if one.task == task.name and (any_call or _bound(task, one.args, one.kwargs) == wanted)
    ]
    early = sum(not one.on_commit for one in same)
    if len(same) == times and not early:
        return
    call = task.name if any_call else shown(task.name, args, kwargs)
    if times == 0:
        lines = [f"{call} was sent {_times(len(same))}, and is not to be sent at all."]
    else:
        on_commit = _times(len(same) - early)
        lines = [f"{call} was sent on commit {on_commit}, instead of {_times(times)}."]
    if early and times:
        lines.append(
            f"It was sent {_times(early)} without waiting for a commit: write "
            f"{task.name.rpartition('.')[2]}.delay_on_commit(...)."
        )
    lines += others
    lines.append("All that was sent:" if sent else "Nothing was sent.")
    lines += [f"  {one}, {'on commit' if one.on_commit else 'not on commit'}" for one in sent]
    raise AssertionError("\n".join(lines))


class _Commits:
    """The callbacks registered with ``transaction.on_commit()``, and how many of them ran."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[[], object]] = []
        self.run = 0

    def describe(self) -> list[str]:
        """Return sentences about the callbacks that did not run."""
        opened = connections.all(initialized_only=True)
        left = [entry[1] for connection in opened for entry in connection.run_on_commit]
        waiting = sum(func in left for func in self.callbacks)
        dropped = len(self.callbacks) - self.run - waiting
        lines = []
        if waiting:
            lines.append(
                f"Callbacks that still wait for a commit: {waiting}. The block stands inside "
                f"atomic(): open the transaction inside of the block."
            )
        if dropped:
            lines.append(f"Callbacks that a rollback dropped: {dropped}.")
        return lines


@contextmanager
def _watching_commits() -> Iterator[_Commits]:
    """Record which messages a commit sends; every send on commit waits for a commit."""
    commits = _Commits()
    on_commit, must_wait = BaseDatabaseWrapper.on_commit, sending_on_commit.must_wait

    def watch(self: BaseDatabaseWrapper, func: Callable[[], object], robust: bool = False) -> None:
        @functools.wraps(func)
        def committing() -> None:
            commits.run += 1
            token = committing_now.set(True)
            try:
                func()
            finally:
                committing_now.reset(token)

        commits.callbacks.append(committing)
        on_commit(self, committing, robust)

    def wait(using: str | None) -> bool:
        must_wait(using)  # raises if it is not clear which transaction was meant
        return True

    with (
        mock.patch.object(BaseDatabaseWrapper, "on_commit", watch),
        mock.patch.object(sending_on_commit, "must_wait", wait),
        mock.patch.object(safe_task, "must_wait", wait),
    ):
        yield commits


def _wanted(task: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the arguments as they arrive at a worker, with defaults filled in."""
    check = getattr(task, "__header__", None)
    if task.typing and check is not None:
        try:
            check(*args, **kwargs)  # as Celery does
        except TypeError as error:
            raise TypeError(
                f"{shown(task.name, args, kwargs)} can't be sent, so it never will: {error}."
            ) from None
    wire = [to_wire(value, task.serializer) for value in args]
    named = {name: to_wire(value, task.serializer) for name, value in kwargs.items()}
    return _bound(task, wire, named)


def _bound(task: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        call = signature(task.run).bind(*args, **kwargs)
    except TypeError:
        return args, kwargs  # they don't fit; without `typing` Celery sends them anyway
    call.apply_defaults()
    return call.arguments


def _times(count: int) -> str:
    return f"{count} time" if count == 1 else f"{count} times"
