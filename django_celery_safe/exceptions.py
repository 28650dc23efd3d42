"""
Every error that django_celery_safe raises, in one tree.

Raw values go to ``super().__init__``, so that errors survive pickling (Celery
sends them between processes); the sentence for people is built in ``__str__``.
"""

from __future__ import annotations

from types import TracebackType
from typing import TypeAlias

from celery.exceptions import SoftTimeLimitExceeded
from django.core.exceptions import ImproperlyConfigured

#: The arguments of a context manager's ``__exit__``: an error's type, the error, its traceback.
ExcInfo: TypeAlias = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]


class CelerySafeError(Exception):
    """Base of all errors of this package."""


class ConfigurationError(CelerySafeError, ImproperlyConfigured):
    """A setting, a decorator's option or an argument can't mean anything."""


class BackendNotSupported(ConfigurationError):
    """
    The cache or database can't hold a lock that excludes, can't list its locks, or is of a
    kind on which this app was never tested.

    Args:
        where: What was asked for, such as ``CACHES["default"] (FileBasedCache)``.
        reason: Why it can't, as a clause.
        hint: What to use instead, as a sentence.
        what: What it can't do.
    """

    def __init__(self, where: str, reason: str, hint: str, what: str = "hold locks") -> None:
        super().__init__(where, reason, hint, what)
        self.where, self.reason, self.hint, self.what = where, reason, hint, what

    def __str__(self) -> str:
        return f"{self.where} can't {self.what}: {self.reason}. {self.hint}"


class WrongTransaction(CelerySafeError):
    """Something was called inside, or outside, the transaction it needs."""


class LockError(CelerySafeError):
    """Base of the errors of locks."""


class LockNotAcquired(LockError):
    """
    The lock is not ours, because someone else holds it or it was never acquired.

    Args:
        name: The lock's name.
        holder: Who holds it, as :attr:`HeldLock.holder` says it; empty where
            it is not known.
        waited: Seconds that were spent waiting.
    """

    def __init__(self, name: str, holder: str = "", waited: float = 0.0) -> None:
        super().__init__(name, holder, waited)
        self.name, self.holder, self.waited = name, holder, waited

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
        holder: Who holds it.
        waited: Seconds that were spent waiting.
        task_id: Id of the task that is running; None where it is not known,
            as after a direct call.
    """

    def __init__(
        self, name: str, holder: str = "", waited: float = 0.0, task_id: str | None = None
    ) -> None:
        super().__init__(name, holder, waited)
        self.args = (name, holder, waited, task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        by = f" by {self.holder}" if self.holder else ""
        waited = f" after waiting {self.waited:.3g} s" if self.waited else ""
        return (
            f"Another run of this task holds the lock {self.name!r}{by}, so this one did not "
            f"start{waited}. Send it again when that run has ended, or see on_conflict."
        )


class LockLost(LockError):
    """
    The lock was ours and is no longer: its lease ended, or it was freed or
    forgotten by the store. Someone else may hold it now.

    Args:
        name: The lock's name.
        holder: Who holds it now; empty if nobody does or it is not known.
    """

    def __init__(self, name: str, holder: str = "") -> None:
        super().__init__(name, holder)
        self.name, self.holder = name, holder

    def __str__(self) -> str:
        now = f"it is held by {self.holder} now" if self.holder else "someone else may hold it now"
        return (
            f"The lock {self.name!r} is no longer ours: {now}. Stop, and undo or leave "
            f"uncommitted what the lock was to protect."
        )


class LockBackendError(LockError):
    """
    The cache or database that holds the locks did not answer, or refused.

    This says nothing about who holds the lock.

    Args:
        where: The store, such as ``CACHES["default"] (redis)``.
        action: What was asked of it: acquire, release, extend, peek or list.
        reason: The client's own error, as text.
        hint: What to do, as a sentence, if the server answered that it will not do it;
            empty: it did not answer.
    """

    def __init__(self, where: str, action: str, reason: str, hint: str = "") -> None:
        super().__init__(where, action, reason, hint)
        self.where, self.action, self.reason, self.hint = where, action, reason, hint

    def __str__(self) -> str:
        if self.hint:
            return f"{self.where} refused to {self.action}: {self.reason}. {self.hint}"
        return (
            f"{self.where} did not answer to {self.action} ({self.reason}). Whether the lock is "
            f"free is not known; check that the server is up and reachable."
        )


class SendError(CelerySafeError):
    """Base of the errors of sending."""


class AlreadySent(SendError):
    """
    The same task was sent before and has not started, or not ended, yet.

    Args:
        name: The lock's name, ``<task name>:<key>``.
        task_id: Id of the task that was sent first.
        remaining: Seconds until the same can be sent again if nobody hears of that one any
            more; None where it is not known.
    """

    def __init__(self, name: str, task_id: str, remaining: float | None = None) -> None:
        super().__init__(name, task_id, remaining)
        self.name, self.task_id, self.remaining = name, task_id, remaining

    def __str__(self) -> str:
        text = f"{self.name!r} was sent already, as task {self.task_id}; nothing was sent."
        if self.remaining is None:
            return text
        return f"{text} If that one got lost, the same can be sent in {self.remaining:.3g} s."


class NotSerializable(SendError, TypeError):
    """
    An argument can't travel in a message.

    Args:
        task: The task's name.
        argument: Where the value stands, such as ``args[0]`` or ``kwargs['user']``.
        value: What it is, such as ``an instance of User``.
        hint: What to send instead, as a sentence.
    """

    def __init__(self, task: str, argument: str, value: str, hint: str) -> None:
        super().__init__(task, argument, value, hint)
        self.task, self.argument, self.value, self.hint = task, argument, value, hint

    def __str__(self) -> str:
        return (
            f"{self.argument} of task {self.task} is {self.value}, which can't be sent in a "
            f"message. {self.hint}"
        )


class IdempotencyError(CelerySafeError):
    """Base of the errors of doing things once."""


class IdempotencyConflict(IdempotencyError):
    """
    The same key was used before with other arguments.

    Args:
        key: The key.
        before: Who used it, as :attr:`HeldLock.holder` says it.
    """

    def __init__(self, key: str, before: str) -> None:
        super().__init__(key, before)
        self.key, self.before = key, before

    def __str__(self) -> str:
        return (
            f"The key {self.key!r} was used with other arguments by {self.before or 'someone'}, so "
            f"nothing was done. A key stands for all that decides what is done: take what differs "
            f"into it, or give a new one."
        )


class AlreadyClaimed(IdempotencyError):
    """
    Somebody else is doing it now.

    Args:
        key: The key.
        holder: Who does it, as :attr:`HeldLock.holder` says it.
        task_id: Id of the task that does it; None outside tasks.
        remaining: Seconds until the claim is free if its holder is gone.
    """

    def __init__(self, key: str, holder: str, task_id: str | None, remaining: float) -> None:
        super().__init__(key, holder, task_id, remaining)
        self.key, self.holder = key, holder
        self.task_id, self.remaining = task_id, remaining

    def __str__(self) -> str:
        return (
            f"{self.key!r} is being done by {self.holder or 'someone else'}, so this call did "
            f"nothing. Retry later: you get its stored result, or, if its process has died, the "
            f"claim is free in {self.remaining:.3g} s and your call does the work."
        )


class ClaimLost(IdempotencyError):
    """
    The claim was ours and is no longer: its lease ended, or the record was forgotten.

    Args:
        key: The key.
        holder: Who has it now; empty if nobody does.
    """

    def __init__(self, key: str, holder: str = "") -> None:
        super().__init__(key, holder)
        self.key, self.holder = key, holder

    def __str__(self) -> str:
        now = f"{self.holder} claimed it since" if self.holder else "its record is gone"
        return (
            f"{self.key!r} is no longer claimed by this call: {now}. What it did counts for "
            f"nothing, and may have been done twice: roll it back where that is possible."
        )


class ResultNotStored(IdempotencyError):
    """
    A thing was done, and its result could not be kept for repeats.

    Args:
        key: The key.
        reason: Why, as a clause.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key, self.reason = key, reason

    def __str__(self) -> str:
        return (
            f"The result of {self.key!r} can't be kept: {self.reason}. Return little and plain "
            f"data, such as the primary key of what was made."
        )


class StageError(CelerySafeError):
    """Base of the errors of stages."""


class InvalidPlan(StageError, ValueError):
    """
    A plan of stages can't be run as it stands.

    Args:
        where: What is wrong, such as ``entry 3, ('shop.tasks.index', 2)``.
        reason: What is wrong with it, as a clause.
        hint: What to write instead, as a sentence.
    """

    def __init__(self, where: str, reason: str, hint: str) -> None:
        super().__init__(where, reason, hint)
        self.where, self.reason, self.hint = where, reason, hint

    def __str__(self) -> str:
        return f"The plan can't be run: {self.where} {self.reason}. {self.hint}"


class InvalidResult(StageError, ValueError):
    """
    What a step returned says nothing, or can't be kept for the next stages.

    Args:
        task: The step's task.
        reason: What is wrong with it, as a clause.
    """

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(task, reason)
        self.task, self.reason = task, reason

    def __str__(self) -> str:
        return (
            f"The step {self.task} can't go on with what it returned: {self.reason}. Return a dict "
            f"of plain data for the next stages, None, True, False, or (success, dict)."
        )


class IllegalTransition(StageError):
    """
    A run of stages is not in a state from which this can be done.

    Args:
        run: Which run, such as ``run 12``.
        action: What was to be done: resume or abort.
        reason: Why not, as a clause.
    """

    def __init__(self, run: str, action: str, reason: str) -> None:
        super().__init__(run, action, reason)
        self.run, self.action, self.reason = run, action, reason

    def __str__(self) -> str:
        return f"Can't {self.action} {self.run}: {self.reason}. Nothing was changed."


class StepLost(StageError):
    """
    A step was ours and is no longer: its lease ended, and another delivery of its message,
    or a resumed run, has it now.

    Args:
        step: Which step, as ``<task>[<task id>]``.
        run: Its run, such as ``run 12``.
        holder: Who has it now; empty if nobody does.
    """

    def __init__(self, step: str, run: str, holder: str = "") -> None:
        super().__init__(step, run, holder)
        self.step, self.run, self.holder = step, run, holder

    def __str__(self) -> str:
        now = f"{self.holder} runs it now" if self.holder else "nobody is known to run it now"
        return (
            f"The step {self.step} of {self.run} is no longer this process's: {now}. What it "
            f"returned counts for nothing, and what it did may be done twice."
        )


class MessageLost(CelerySafeError):
    """
    A task was ours and is no longer: its lease ended, and another run has it now.

    Args:
        task: Which task, as ``<name>[<id>]``.
        holder: Who has it now; empty if nobody does.
    """

    def __init__(self, task: str, holder: str = "") -> None:
        super().__init__(task, holder)
        self.task, self.holder = task, holder

    def __str__(self) -> str:
        now = f"{self.holder} runs it now" if self.holder else "nobody is known to run it now"
        return (
            f"The task {self.task} is no longer this process's: {now}. Its end counts for nothing "
            f"here, and what it did may be done twice."
        )


class TaskPoisoned(CelerySafeError):
    """
    A task is not run again, since so many processes died in it.

    Args:
        task: Which task, as ``<name>[<id>]``.
        deaths: How many they were.
        last: The last of them; empty if it is not known.
    """

    def __init__(self, task: str, deaths: int, last: str = "") -> None:
        super().__init__(task, deaths, last)
        self.task, self.deaths, self.last = task, deaths, last

    def __str__(self) -> str:
        last = f", the last one {self.last}" if self.last else ""
        return (
            f"{self.deaths} process(es) died in {self.task}{last}. Find out why before you let it "
            f"run again, by manage.py celery_outbox retry; max_deaths says how many may die."
        )


def describe_error(error: BaseException) -> str:
    """Say an error of someone else's library in one line."""
    return f"{type(error).__name__}: {text_of(error) or 'no message'}"


def text_of(error: BaseException) -> str:
    """Return what an error says of itself; "" if that fails."""
    try:
        return str(error).strip()
    except Exception:  # noqa: BLE001 - it is someone else's
        return ""


def find_soft_time_limit(error: BaseException | None) -> SoftTimeLimitExceeded | None:
    """Return the soft time limit that an error is, or that it took the place of; None: no such."""
    while error is not None and not isinstance(error, SoftTimeLimitExceeded):
        # Leaving Django's atomic(), it ends in an error of the connection that it cut off.
        error = error.__context__
    return error


def find_interruption(
    error: BaseException, outer: BaseException | None
) -> SoftTimeLimitExceeded | None:
    """
    Return the soft time limit that an error is, or took the place of; None: no new one.

    Args:
        outer: The error that was being handled before, whose soft time limit is not a new one.
    """
    limit = find_soft_time_limit(error)
    return None if limit is find_soft_time_limit(outer) else limit
