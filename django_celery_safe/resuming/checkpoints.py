"""
How far some work got, as the row of its claim keeps it.

A loop of ``loop.py`` sets such cursors, and :func:`checkpoint` does for what has no key and no
index, such as a file. A task whose worker shuts down ends at its next checkpoint, and another goes
on. A signal reaches only the main process of a worker. It tells its children by a byte of memory
that they share since it forked them: no statement, and nothing that could be late or get lost.
Where a pool does not fork, the task is not told, and ends as it would without this.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple, Self

from celery import signals
from django.db import transaction

from ..delivery.copies import WillBeRedelivered
from ..exceptions import ConfigurationError
from ..leases.claim import Claim, current_claim, own_claims
from ..texts import get_logger
from ..transactions import in_atomic
from ..values import NotPlain, decode, encode

logger = get_logger(__name__)

#: Longest cursor, characters of JSON: each checkpoint writes all of it.
LONGEST: Final = 4096
#: Says in a row that its cursor was set by :func:`checkpoint`.
OF: Final = "checkpoint()"
#: Not 0 once the worker shuts down. A worker has one that its children share.
_shared: Any = bytearray(1)


class Cursor(NamedTuple):
    """
    How far some work got.

    Attributes:
        of: What the work walks, such as ``shop.price by id``; None: it had other arguments, before
            a retry.
        at: Where it is: the last key, the next index, or what ``checkpoint()`` was given.
        done, total: How many items were done, and how many there were at the start; None: not
            known.
    """

    of: str | None
    at: Any = None
    done: int | None = None
    total: int | None = None

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the cursor that a row keeps; None: the row has none."""
        return cls(*decode(text)) if text else None

    def encode(self) -> str:
        """
        Return the text for a row.

        Raises:
            ConfigurationError: JSON can't represent it, or it is too long.
        """
        try:
            return encode([*self], LONGEST)
        except NotPlain as error:
            raise ConfigurationError(
                f"A cursor has to be a little plain data, and {self.at!r:.200} is not: {error}."
            ) from error

    @property
    def progress(self) -> str:
        """How far the work got, for people."""
        if self.done is None:
            return f"{self.at!r:.40}"
        return f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"


def begin_walk(of: str, what: str) -> tuple[Claim, Cursor | None]:
    """
    Return the claim under which the running code works, and the cursor that its run began with.

    Args:
        of: What is walked, as :class:`Cursor` names it.
        what: The function that was called, for errors.

    Raises:
        ConfigurationError: The code has no claim, or walks something else as well; or the cursor
            is of something else.
        ClaimLost: The claim is no longer ours.
    """
    claim = current_claim()
    claim.check_unfinished()
    if not claim.walks:
        claim.place = claim.read_cursor()
        cursor = Cursor.read(claim.place)
        if cursor is not None and cursor.of != of:
            raise unfit(claim, cursor, f"the code walks {of}")
        claim.walks, claim.began_with = of, cursor
    elif claim.walks != of or what == "resumable()":
        raise ConfigurationError(
            f"{claim.key!r} has one cursor, that of {claim.walks}, and can't keep a second one, of "
            f"{of}. Put each loop into a task, or a step, of its own."
        )
    return claim, claim.began_with


def record(alias: str, text: str) -> Claim | None:
    """Record an encoded cursor of the running work; return a claim that is no longer ours."""
    claim = current_claim()
    moved = text != claim.place  # otherwise a death is one without progress
    for one in own_claims():  # a message has a place of its own, beside that of a key inside it
        values = {"lease": one.seconds, "moved": moved, "cursor": text if one is claim else None}
        if one.table.alias == alias and not one.table.move(one.name, one.token, **values):
            return one
    claim.place = text
    return None


def unfit(claim: Claim, cursor: Cursor, why: str) -> ConfigurationError:
    """Return the error for a cursor that does not fit the code."""
    return ConfigurationError(
        f"The cursor of {claim.key!r} does not fit the code: it is at {cursor.at!r:.200} of "
        f"{cursor.of or 'other arguments'}, and {why}. Nothing was done. Undo the change, or "
        f"discard the message and send the task again, which begins anew."
    )


def checkpoint(cursor: Any) -> None:
    """
    Record how far the running task got, where :func:`resumable` can't, such as in a file.

    Inside ``atomic()`` on the database of the task's row, the block's writes and the cursor are
    committed together. Outside of a block it is committed at once, and what was done since the last
    checkpoint may be done twice.

    A worker that shuts down hands the task over here; what the open block has written is rolled
    back.

    Args:
        cursor: A little plain data, such as the offset in a file.

    Raises:
        ClaimLost: Another process does the work now; leave the block with this error.
        ConfigurationError: The code has no claim, or the cursor is no plain data.

    Example:
        >>> from django.db import transaction
        >>> from django_celery_safe import checkpoint, resumed_at
        >>> def read_log(path):
        ...     with open(path) as file:
        ...         file.seek(resumed_at() or 0)
        ...         while lines := file.readlines(100_000):
        ...             with transaction.atomic():
        ...                 save_all(lines)
        ...                 checkpoint(file.tell())
    """
    claim, _ = begin_walk(OF, "checkpoint()")
    if claim.table is None:
        return
    alias, place = claim.table.alias, Cursor(OF, cursor).encode()
    if in_atomic(alias):
        # Even if the block does not see the error.
        with transaction.mark_for_rollback_on_error(using=alias):
            hand_over_if_told()
            if (lost := record(alias, place)) is not None:
                lost.raise_lost()
    elif (lost := claim.ask(lambda: record(alias, place))) is not None:
        lost.raise_lost()
    hand_over_if_told()


def resumed_at() -> Any:
    """
    Return the last cursor that :func:`checkpoint` recorded in an earlier run; None: there is none.

    Raises:
        ConfigurationError: The code has no claim, or its cursor is one of ``resumable()``.
    """
    _, cursor = begin_walk(OF, "resumed_at()")
    return None if cursor is None else cursor.at


class HandedOver(WillBeRedelivered):
    """Ends a run whose worker shuts down; a relay sends its message to another worker."""


def connect() -> None:
    """Hear of the begin and the end of this process's worker."""
    signals.worker_init.connect(_on_init, dispatch_uid=__name__)
    signals.worker_shutting_down.connect(_on_shutting_down, dispatch_uid=__name__)
    signals.worker_shutdown.connect(_on_shutting_down, dispatch_uid=__name__)


def _on_init(sender: Any, **kwargs: Any) -> None:
    import mmap  # a process that is no worker needs none

    global _shared
    _shared = mmap.mmap(-1, 1)
    # A soft shutdown, and one by remote control, send no signal before they wait for tasks.
    for name in ("wait_for_soft_shutdown", "stop"):
        setattr(sender, name, partial(_tell_and, getattr(sender, name)))


def _tell_and(wait: Any, *args: Any, **kwargs: Any) -> Any:
    _on_shutting_down()
    return wait(*args, **kwargs)


def _on_shutting_down(signal: Any = None, **kwargs: Any) -> None:
    # When it is over, this process goes on without a worker, as one of a test does.
    _shared[0] = signal is not signals.worker_shutdown


def hand_over_if_told() -> None:
    """
    End the run at a checkpoint if its worker shuts down and a row runs it again.

    Raises:
        HandedOver: The run ends; if the task catches this, the run still does not count as done.
    """
    for one in own_claims():
        if _shared[0] and one.is_carried:
            one.handed_over = HandedOver("Its worker shuts down, and another one goes on")
            logger.info("%s is handed over: its worker shuts down.", one.key)
            raise one.handed_over
