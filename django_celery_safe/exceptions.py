"""
Every error that django_celery_safe raises, in one tree; and the end that another may hide.

An error keeps raw values, also as ``args``, so that it survives pickling (Celery sends errors
between processes); the sentence for people is built in ``__str__``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, dataclass_transform

from celery.exceptions import SoftTimeLimitExceeded, WorkerTerminate
from django.core.exceptions import ImproperlyConfigured


@dataclass_transform(eq_default=False)
class CelerySafeError(Exception):
    """Base of all errors of this package."""

    def __init_subclass__(cls) -> None:
        # Each error is a dataclass of its values.
        dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        # pickle and Celery make an error again of its args.
        self.args = tuple(vars(self).values())


class ConfigurationError(CelerySafeError, ImproperlyConfigured):
    """
    The settings or the code have to be changed: a value is not valid, a cache or database can't
    do what it is to do, or a lock or a claim is used in a way that can't work.
    """

    sentence: str


class WrongTransaction(CelerySafeError):
    """Something was called inside, or outside, the transaction it needs."""

    sentence: str


class LockNotAcquired(CelerySafeError):
    """
    The lock is not ours, because someone else holds it or it was never acquired.

    Args:
        name: The lock's name.
        holder: The holder, as in :attr:`HeldLock.holder`; empty where it is not known.
        waited: Seconds that were spent waiting.
    """

    name: str
    holder: str = ""
    waited: float = 0.0

    def __str__(self) -> str:
        if not self.holder:
            return (
                f"The lock {self.name!r} is not ours: it was not acquired, or was released again. "
                f"Acquire it first, and ask whether that worked: if lock: ..."
            )
        waited = f" after waiting {self.waited:.3g} s" if self.waited else ""
        return (
            f"The lock {self.name!r} is held by {self.holder} and was not acquired{waited}. "
            f"Try again later, or wait for it with blocking_timeout."
        )


class AlreadyRunning(LockNotAcquired):
    """
    Another run of the task holds its lock.

    Args:
        name: The lock's name, ``<task name>:<key>``.
        holder: The process that holds it.
        waited: Seconds that were spent waiting.
        task_id: Id of the task that is running; None: not known, as after a direct call.
    """

    task_id: str | None = None

    def __str__(self) -> str:
        waited = f" after waiting {self.waited:.3g} s" if self.waited else ""
        return (
            f"Another run of this task, by {self.holder or 'someone else'}, holds the lock "
            f"{self.name!r}, so this one did not start{waited}. Send it again when that run has "
            f"ended, or see on_conflict."
        )


class LockLost(CelerySafeError):
    """
    The lock was ours and is no longer: its lease ended, or it was freed or
    forgotten by the store. Someone else may hold it now.

    Args:
        name: The lock's name.
        holder: The process that holds it now; empty if it is free, or this is not known.
    """

    name: str
    holder: str = ""

    def __str__(self) -> str:
        return (
            f"The lock {self.name!r} is no longer ours: {self.holder or 'someone else'} may hold "
            f"it now. Stop, and undo or leave uncommitted what the lock was to protect."
        )


class LockBackendError(CelerySafeError):
    """
    The store of the locks did not answer, or refused: who holds the lock is not known.

    Args:
        where: The store, such as ``CACHES["default"] (redis)``.
        action: The request: acquire, release, extend, peek or list.
        reason: The client's own error, as text.
        hint: Advice, as a sentence, if the server answered that it refuses the request;
            empty: it did not answer.
    """

    where: str
    action: str
    reason: str
    hint: str = ""

    def __str__(self) -> str:
        if self.hint:
            return f"{self.where} refused to {self.action}: {self.reason}. {self.hint}"
        return (
            f"{self.where} did not answer to {self.action} ({self.reason}). Whether the lock is "
            f"free is not known; check that the server is up and reachable."
        )


class NotSerializable(CelerySafeError, TypeError):
    """
    An argument can't travel in a message.

    Args:
        task: The task's name.
        argument: Where the value stands, such as ``args[0]`` or ``kwargs['user']``.
        value: Its description, such as ``an instance of User``.
        hint: Advice on what to send instead, as a sentence.
    """

    task: str
    argument: str
    value: str
    hint: str

    def __str__(self) -> str:
        return (
            f"{self.argument} of task {self.task} is {self.value}, which can't be sent in a "
            f"message. {self.hint}"
        )


class IdempotencyConflict(CelerySafeError):
    """
    The same key was used before with other arguments.

    Args:
        key: The key.
        before: The holder that used it before, as in :attr:`HeldLock.holder`.
    """

    key: str
    before: str

    def __str__(self) -> str:
        return (
            f"The key {self.key!r} was used with other arguments by {self.before or 'someone'}, so "
            f"nothing was done. A key has to cover every argument that changes the work: add the "
            f"argument that differs to the key, or use a new key."
        )


class AlreadyClaimed(CelerySafeError):
    """
    Somebody else is doing it now.

    Args:
        key: The key.
        holder: The process that does it, as in :attr:`HeldLock.holder`.
        task_id: Id of the task that does it; None: outside of tasks.
        remaining: Seconds until the claim is free if its holder is gone.
    """

    key: str
    holder: str
    task_id: str | None
    remaining: float

    def __str__(self) -> str:
        return (
            f"{self.key!r} is being done by {self.holder or 'someone else'}, so this call did "
            f"nothing. Retry later: you get its stored result, or, if its process has died, the "
            f"claim is free in {self.remaining:.3g} s and your call does the work."
        )


class ClaimLost(CelerySafeError):
    """
    The work was ours and is no longer: its lease ended and someone else has it, or its row is gone.

    Args:
        key: The key; for a carried task or a step ``<task>[<task id>]``.
        holder: The process that has it now; empty if none is known.
    """

    key: str
    holder: str = ""

    def __str__(self) -> str:
        return (
            f"{self.key!r} is no longer claimed here: {self.holder or 'someone else'} may do it "
            f"now. It is not recorded as done, and may be done twice: roll it back where possible."
        )


class AlreadyStarted(CelerySafeError):
    """
    A run with this key has not ended, so no second one was started.

    Args:
        key: The key.
        run: That run, a ``StageRun``; None: it has ended, or is not visible yet.
    """

    key: str
    run: Any = None

    def __str__(self) -> str:
        first = f"{self.run.title}, which is {self.run.status}," if self.run else "Another run"
        return (
            f"{first} has the key {self.key!r}, so no second run was started. Use that run (the "
            f"error's .run), or try again when it has ended."
        )


class InvalidResult(CelerySafeError, ValueError):
    """
    A result can't be stored, or it is a value that a step must not return.

    Args:
        work: The key of the work, or the step's task.
        reason: The fault of the value, as a clause.
        hint: Advice on what to return instead, as a sentence.
    """

    work: str
    reason: str
    hint: str = "Return a little plain data, such as the primary key of what was created."

    def __str__(self) -> str:
        return f"The result of {self.work!r} can't be used: {self.reason}. {self.hint}"


class IllegalTransition(CelerySafeError):
    """
    A run of stages is not in a state from which this can be done.

    Args:
        run: The run, such as ``run 12``.
        action: The request: resume or abort.
        reason: The reason why it is refused, as a clause.
    """

    run: str
    action: str
    reason: str

    def __str__(self) -> str:
        return f"Can't {self.action} {self.run}: {self.reason}. Nothing was changed."


class TaskPoisoned(CelerySafeError):
    """
    A task is not run again, since so many processes died in it.

    Args:
        task: The task, as ``<name>[<id>]``.
        deaths: How many processes died in it.
        last: The last of them; empty if it is not known.
    """

    task: str
    deaths: int
    last: str = ""

    def __str__(self) -> str:
        return (
            f"{self.deaths} process(es) died in {self.task}, the last one {self.last or 'unknown'}."
            " Find out why before you let it run again (celery_outbox retry, celery_stages resume, "
            "or a new send); max_deaths says how many may die."
        )


def find_soft_time_limit(
    error: BaseException | None, outer: BaseException | None = None
) -> SoftTimeLimitExceeded | None:
    """
    Return the soft time limit that an error is, or that it took the place of; None: no such.

    Args:
        outer: The error that was being handled before, whose soft time limit is not a new one.
    """
    while error is not None and not isinstance(error, SoftTimeLimitExceeded):
        # Leaving Django's atomic(), it ends in an error of the connection that it cut off.
        error = error.__context__
    return None if outer is not None and error is find_soft_time_limit(outer) else error


def find_shutdown(error: BaseException) -> WorkerTerminate | None:
    """
    Return the end of the worker that an error inside a task stands for; None: no end.

    At SIGQUIT a worker kills the processes of its tasks. With ``-P solo`` that is its own process,
    and Celery raises NotImplementedError out of the signal, in the middle of the task.
    """
    state = sys.modules.get("celery.worker.state")  # a process that is no worker has not loaded it
    code = getattr(state, "should_terminate", None)
    if code is None or not isinstance(error, NotImplementedError):
        return None
    return WorkerTerminate(code)
