"""
Sending the running task's message again.

There are two cases. With ``on_conflict="retry"`` a message that meets a held lock is sent
again, to arrive later. A message that meets the lock of its own task id (redelivered by the
broker, or its own retry) is sent again to arrive when the lease is over, since the holder may
be dead. Such copies must not multiply: at most one of each task id is on its way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from .. import conf
from ..events import (
    COPY_DROPPED,
    TASK_OWN_COPY,
    TASK_OWN_COPY_DROPPED,
    TASK_OWN_COPY_OR_SECOND_SEND,
)
from ..exceptions import LockBackendError
from ..leases.holder import Holder, arguments_of
from ..leases.store import Renewal
from ..locks import CacheLock, HeldLock
from ..locks.stores import Location
from ..locks.stores.base import Acquired, Store
from ..texts import get_logger
from .header import declare_field, get_header, is_token, with_header

T = TypeVar("T")

logger = get_logger(__name__)

#: The visibility timeout of brokers that redeliver by time, where the project sets none, s
#: (kombu: transport/redis.py, transport/SQS).
VISIBILITY_TIMEOUT: Final = 3600.0
SQS_VISIBILITY_TIMEOUT: Final = 1800.0
#: Brokers that mark a message that they deliver again; SQS, for one, does not (kombu 5.7).
MARKING: Final = ("redis", "rediss", "sentinel", "amqp", "amqps", "pyamqp")
#: Seconds that a message waits for the run of its own task id before it is sent again: a
#: retry without delay may arrive before the run that sent it has ended.
OWN_RUN_WAIT: Final = 0.5
#: Pause before it looks again, s.
PAUSE: Final = 0.05
#: Shortest delay of a copy, s: the lease's end is known to the millisecond only.
SHORTEST_DELAY: Final = 0.05


#: In which field of the header a copy has its marker's token, and what the marker is called by.
CopyName: TypeAlias = Literal["copy", "claim_copy"]


#: Token of the marker that says that this copy of a message is under way.
declare_field("copy", is_token)
#: Token of the run whose lock that copy waits for.
declare_field("met", is_token)
#: As ``copy``, of a copy that waits for the end of a claim.
declare_field("claim_copy", is_token)
COPY_FIELDS: Final = ("copy", "met", "claim_copy")


class Rejected(Reject, Ignore):
    """
    A Reject that ``autoretry_for`` leaves alone.

    Celery's autoretry passes on only Ignore and Retry, and would retry a plain
    Reject; its tracer looks for Reject first (Celery 5.7).
    """


class MessageGoesOn(Ignore):
    """An Ignore that ends a run whose message is left to a copy, or was done by another run."""


class WillBeRedelivered(MessageGoesOn):
    """It ends a run whose message will be redelivered, with its work not done."""


def is_requeued(error: BaseException | None) -> bool:
    """Return whether a run ended with the wish to get its message again."""
    return isinstance(error, Reject) and bool(getattr(error, "requeue", False))


class Resent(NamedTuple):
    """
    Which sends are of the running task's own message.

    Attributes:
        task_id: The id of these sends; None: any, such as the parts of what replaces the task.
        unchanged: Whether it is the very message again, key and all.
    """

    task_id: str | None
    unchanged: bool


_resent: ContextVar[Resent | None] = ContextVar("django_celery_safe_resent", default=None)


@contextmanager
def resending(task_id: str | None, *, unchanged: bool = False) -> Iterator[None]:
    """
    Mark the sends inside that are of the running task's own message, and never held back.

    Args:
        task_id: Its id, since receivers of Celery's signals may send other tasks; None: all.
        unchanged: Whether it is the very message again, key and all.
    """
    token = _resent.set(Resent(task_id, unchanged))
    try:
        yield
    finally:
        _resent.reset(token)


def find_resent(task_id: str | None) -> Resent | None:
    """Return what is known of a send with this id, if it is of the running task's own message."""
    resent = _resent.get()
    return resent if resent is not None and resent.task_id in (None, task_id) else None


def resend_later(
    task: Any, request: Context, delay: float, why: str = "Another run holds the lock"
) -> NoReturn:
    """
    Send the message again, to arrive ``delay`` seconds from now, and end this run.

    Earlier, if the broker would deliver it again before that. Same id, and
    ``retries`` as it is, so that ``max_retries`` counts only what the task itself
    retries.

    Raises:
        Retry: Always, if it was sent.
    """
    delay = min(delay, _longest_delay(task))
    signature = task.signature_from_request(request, countdown=delay)
    _send(task, request, signature)
    raise Retry(why, when=delay, sig=signature)  # type: ignore[arg-type]


def requeue_self(
    task: Any, request: Context, contender: HeldLock, markers: Location, *, of_claim: bool = False
) -> NoReturn:
    """
    Make sure that one copy of the message arrives after the lease, and end this run.

    1. The copy's marker is looked at, ``<task>:copy:<id>:<attempt>``, which is of this attempt
       alone: a retry has the same id. If it is another copy's, that one is on its way, and
       this message is dropped.
    2. The copy is sent. It carries the token of its marker, and that of the run that it met.
    3. Its marker is set. Only now, so that dying or standing still before it loses nothing: at
       worst two copies travel until the first of them arrives.
    4. A run that ends by itself, and sees the marker when it frees its lock, sets another,
       ``<task>:ended:<token of the run>``. A copy that finds it has nothing left to do. A run
       that ends between 2 and 3, or dies before it sets it, is done once more.

    A message that meets a claim of ``idempotent`` has a marker of another name, since the
    same message may meet a lock too, and needs no ``ended``: the record says what was done.

    Args:
        contender: The holder that the message met.
        markers: Where to keep the markers of copies.
        of_claim: Whether that is a claim, not a lock.

    Raises:
        WillBeRedelivered: Always, if a copy is on its way.
    """
    name: CopyName = "claim_copy" if of_claim else "copy"
    marker = copy_marker(task, request, name)
    header = get_header(request)
    carried = header.get(name)
    store = markers.store()
    known = store.peek(marker)
    if known is not None and known.token != carried:
        _emit_own_copy(task, request, contender, None)
        raise WillBeRedelivered("Another copy of this message is on its way")
    left = contender.remaining
    if left is None:  # a store that can't tell
        left = conf.lock_timeout()
    delay = min(max(left, SHORTEST_DELAY), _longest_delay(task))
    lasts = delay + visibility_timeout(task.app)
    token = os.urandom(16).hex()
    signature = task.signature_from_request(request, countdown=delay)
    again: Any = {**header, "task": task.name, name: token}
    arguments = arguments_of(request)
    holder = Holder(since=time.time(), task=task.name, task_id=request.id, arguments=arguments)
    if not of_claim and contender.token:
        again["met"] = contender.token
    # Celery's choice of the headers: RabbitMQ drops what still carries its x-death.
    signature.options.update(with_header(signature.options, again))
    _send(task, request, signature)
    _set_marker(store, marker, token, lasts, holder, carried)
    first = carried is None and _attempt(request) == "0.0"
    marked = _is_redelivered(request) or _broker_scheme(task.app) not in MARKING
    twice = first and not of_claim and not marked
    _emit_own_copy(task, request, contender, delay, twice=twice)
    raise WillBeRedelivered(
        f"Met {contender.name!r}, which is held; a copy of the message comes back"
    )


def drop_if_run_ended(task: Any, request: Context, markers: Location) -> None:
    """
    End a copy at once if the run whose lock it waited for has ended by itself.

    Otherwise every run that is longer than the broker's redelivery would be followed by
    another, without end.

    Raises:
        MessageGoesOn: That run has ended, and did what the message was for.
    """
    run_token = get_header(request).get("met")
    store = markers.store()
    ended = None if run_token is None else store.peek(_end_marker(task, run_token))
    if ended is None:
        return
    delete_markers(task, request, markers)
    _delete_marker(store, ended.name, ended.token)
    COPY_DROPPED.emit(requeue_self, task=task.name, task_id=request.id)
    raise MessageGoesOn("The run that this copy waited for has ended")


def begin_or_requeue(
    try_begin: Callable[[], T | HeldLock], task: Any, request: Context, markers: Location
) -> T:
    """
    Begin the work of a claim; while another run does it, send the message again for later.

    Args:
        try_begin: Returns what has begun, or who else does it now.
        markers: Where to keep the markers of copies.

    Raises:
        WillBeRedelivered: A copy of the message is on its way.
    """
    waits_until = time.monotonic() + OWN_RUN_WAIT
    while isinstance(begun := try_begin(), HeldLock):
        # A retry without delay may arrive before the run that sent it has ended.
        if begun.holder.task_id != request.id or time.monotonic() > waits_until:
            requeue_self(task, request, begun, markers, of_claim=True)
        time.sleep(PAUSE)
    return begun


def delete_markers(
    task: Any, request: Context, markers: Location, *, of_claim: bool = False
) -> None:
    """Delete the markers of this re-sent copy: it is running now. Other messages have none."""
    header = get_header(request)
    name: CopyName = "claim_copy" if of_claim else "copy"
    if (token := header.get(name)) is not None:
        _delete_marker(markers.store(), copy_marker(task, request, name), token)


def _delete_marker(store: Store, name: str, token: str) -> None:
    try:
        store.release(name, token)
    except LockBackendError as error:
        logger.warning(
            "The marker of a task's copy could not be deleted; it ends by itself: %s", error
        )


@contextmanager
def marking_end(task: Any, request: Context, lock: CacheLock, markers: Location) -> Iterator[None]:
    """
    Mark the end of a run for a copy of its message, if one waits for it.

    The block releases the run's lock: whether a copy is on its way is looked at in the same
    request. Killed right after that, the run is done once more.
    """
    lock.look_at = copy_marker(task, request)
    try:
        yield
    except BaseException as error:
        # Killed, or put back: then the message comes again, or only its copy does.
        killed = not isinstance(error, Exception)
        if not (killed or isinstance(error, WillBeRedelivered) or is_requeued(error)):
            _mark_if_seen(task, request, lock, markers)
        raise
    _mark_if_seen(task, request, lock, markers)


def _mark_if_seen(task: Any, request: Context, lock: CacheLock, markers: Location) -> None:
    if lock.token_when_seen is not None:
        mark_ended(task, request, markers.store(), lock.token_when_seen)


def mark_ended(task: Any, request: Context, store: Store, run_token: str) -> None:
    """Let a copy of the message, which waits for the lock of a run, find that this has ended."""
    holder = Holder(since=time.time(), task=task.name, task_id=request.id)
    _set_marker(
        store,
        _end_marker(task, run_token),
        os.urandom(16).hex(),
        _longest_marker(task),
        holder,
        None,
    )


def copy_marker(task: Any, request: Context, name: CopyName = "copy") -> str:
    """Return the name of the marker that says that a copy of this very message is on its way."""
    return f"{task.name}:{name}:{request.id}:{_attempt(request)}"


def _end_marker(task: Any, run_token: str) -> str:
    return f"{task.name}:ended:{run_token}"


def _longest_marker(task: Any) -> float:
    return _longest_delay(task) + visibility_timeout(task.app)


def _attempt(request: Context) -> str:
    # A retry, and what replaces a run, are other messages of the same id.
    return f"{request.retries or 0}.{request.replaced_task_nesting or 0}"


def _set_marker(
    store: Store, name: str, token: str, seconds: float, holder: Holder, old: str | None
) -> None:
    """
    Set a marker for so many seconds.

    Args:
        old: Token of the marker that it replaces; any other is left, since it is newer.
    """
    try:
        seconds = store.nearest_lease(seconds)
        outcome = store.acquire(name, token, seconds, holder)
        if isinstance(outcome, Acquired):
            # It may have been there before, for less.
            store.extend([Renewal(name, token, seconds)])
        elif outcome.token == old:
            store.release(name, outcome.token)
            store.acquire(name, token, seconds, holder)
    except LockBackendError as error:
        # Without it another delivery may send one more copy, or one runs in vain.
        logger.warning("The marker of a task's copy could not be set: %s", error)


def _send(task: Any, request: Context, signature: Any) -> None:
    for name in ("argsrepr", "kwargsrepr"):
        # Otherwise Celery would compute it again, and show what was redacted.
        if isinstance(shown := getattr(request, name, None), str):
            signature.options[name] = shown
    try:
        with resending(request.id, unchanged=True):
            signature.apply_async()
    except Exception as error:
        # With acks_late the broker still has the message and can give it back;
        # without, the task fails with this error, where everyone can see it.
        if task.acks_late:
            raise Rejected(error, requeue=True) from error
        raise


def _longest_delay(task: Any) -> float:
    """
    Return for how long a message may wait for its ETA: half the visibility timeout.

    One that waits longer than that timeout is delivered again by the broker, and multiplies.
    """
    return visibility_timeout(task.app) / 2


def visibility_timeout(app: Any) -> float:
    """Return after how many seconds a broker of that kind delivers a message again."""
    options = app.conf.broker_transport_options or {}
    default = SQS_VISIBILITY_TIMEOUT if _broker_scheme(app) == "sqs" else VISIBILITY_TIMEOUT
    return float(options.get("visibility_timeout", default))


def _is_redelivered(request: Context) -> bool:
    info: Any = request.delivery_info or {}
    return bool(info.get("redelivered"))


def _broker_scheme(app: Any) -> str:
    urls = app.conf.broker_write_url or app.conf.broker_url or ""
    return str(urls if isinstance(urls, str) else urls[0]).partition(":")[0]


def _emit_own_copy(
    task: Any, request: Context, contender: HeldLock, delay: float | None, *, twice: bool = False
) -> None:
    event = TASK_OWN_COPY_OR_SECOND_SEND if twice else TASK_OWN_COPY
    if delay is None:
        event = TASK_OWN_COPY_DROPPED
    event.emit(
        requeue_self,
        name=contender.name,
        task=task.name,
        task_id=request.id,
        holder=str(contender.holder),
        delay=delay,
    )
