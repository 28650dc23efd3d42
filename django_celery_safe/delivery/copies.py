"""
Re-sending the running task's message.

There are two cases. With ``on_conflict="retry"``, a message that finds the lock held is re-sent
to arrive later. A message that finds the lock held under its own task id (redelivered by the
broker, or its own retry) is re-sent to arrive when the lease has expired, because the holder may
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
from ..leases.lease import Lease
from ..leases.store import Renewal
from ..locks import HeldLock
from ..locks.stores import Location
from ..locks.stores.base import Acquired, Store
from ..texts import get_logger
from .header import declare_field, get_header, is_token, with_header

T = TypeVar("T")

logger = get_logger(__name__)

#: The default visibility timeout, s, of brokers that redeliver after some time (kombu:
#: transport/redis.py, transport/SQS).
VISIBILITY_TIMEOUT: Final = 3600.0
SQS_VISIBILITY_TIMEOUT: Final = 1800.0
#: Brokers that mark redelivered messages; SQS, for example, does not (kombu 5.7).
MARKING: Final = ("redis", "rediss", "sentinel", "amqp", "amqps", "pyamqp")
#: Seconds that a message waits for the run of its own task id before it is re-sent: a retry
#: without delay may arrive before the run that sent it has ended.
OWN_RUN_WAIT: Final = 0.5
#: Pause before the next try, s.
PAUSE: Final = 0.05
#: Shortest delay of a copy, s: the lease's end is known only to the millisecond.
SHORTEST_DELAY: Final = 0.05


#: The header field with the token of a copy's marker, and a part of the marker's name.
CopyName: TypeAlias = Literal["copy", "claim_copy"]


#: Token of the marker for this copy of a message: the copy is on its way.
declare_field("copy", is_token)
#: Token of the run whose lock this copy waits for.
declare_field("met", is_token)
#: Like ``copy``, for a copy that waits for the end of a claim.
declare_field("claim_copy", is_token)
COPY_FIELDS: Final = ("copy", "met", "claim_copy")


class Rejected(Reject, Ignore):
    """
    A Reject that ``autoretry_for`` leaves alone.

    Celery's autoretry re-raises only Ignore and Retry, and would retry a plain
    Reject. Celery's tracer checks for Reject first (Celery 5.7).
    """


class MessageGoesOn(Ignore):
    """An Ignore that ends a run whose message is left to a copy, or was done by another run."""


class WillBeRedelivered(MessageGoesOn):
    """Ends a run whose work is not done, and whose message will arrive again."""


def is_requeued(error: BaseException | None) -> bool:
    """Return whether a run ended with a Reject that re-queues its message."""
    return isinstance(error, Reject) and bool(getattr(error, "requeue", False))


class Resent(NamedTuple):
    """
    Describes sends that re-send the running task's own message.

    Attributes:
        task_id: The id of these sends; None: any id, such as the parts of a replacement.
        unchanged: Whether the message is the same in everything, including the key.
    """

    task_id: str | None
    unchanged: bool


_resent: ContextVar[Resent | None] = ContextVar("django_celery_safe_resent", default=None)


@contextmanager
def resending(task_id: str | None, *, unchanged: bool = False) -> Iterator[None]:
    """
    Mark sends inside the block as re-sends of the running task, which are never held back.

    Args:
        task_id: The id of the running task, because receivers of Celery's signals may send
            other tasks; None: mark all sends.
        unchanged: Whether the message is the same in everything, including the key.
    """
    before = _resent.get()
    try:
        _resent.set(Resent(task_id, unchanged))  # in the block: a signal handler may raise here
        yield
    finally:
        _resent.set(before)


def find_resent(task_id: str | None) -> Resent | None:
    """Return the description of a send with this id if it re-sends the running task, or None."""
    resent = _resent.get()
    return resent if resent is not None and resent.task_id in (None, task_id) else None


def resend_later(
    task: Any, request: Context, delay: float, why: str = "Another run holds the lock"
) -> NoReturn:
    """
    Re-send the message, to arrive ``delay`` seconds from now, and end this run.

    The delay is shorter if the broker would redeliver the message before that. The id and
    ``retries`` stay the same, so ``max_retries`` counts only the task's own retries.

    Raises:
        Retry: Always, if the message was sent.
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

    1. The marker ``<task>:copy:<id>:<attempt>`` is read. It names the attempt, because a retry
       has the same id. If the marker belongs to another copy, that copy is on its way, and
       this message is dropped.
    2. The copy is sent, with the token of its marker and the token of the run that holds the
       lock.
    3. The marker is set. It is set last so that nothing is lost if this process dies or hangs
       before: at worst two copies travel until the first of them arrives.
    4. A run that ends normally, and sees the marker when it frees its lock, sets another marker,
       ``<task>:ended:<token of the run>``. A copy that finds this marker has nothing to do. If
       the run ends between 2 and 3, or dies before it sets the marker, the work is done again.

    A message that finds a claim of ``idempotent`` uses a marker with another name, because the
    same message may also find a lock. It needs no ``ended`` marker: the record shows the result.

    Args:
        contender: The holder that the message found.
        markers: Where to keep the markers of copies.
        of_claim: Whether the contender holds a claim, not a lock.

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
    if left is None:  # the store does not report it
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
    End a copy at once if the run whose lock it waited for has ended normally.

    Otherwise every run that is longer than the broker's redelivery time would be followed
    by another run, without end.

    Raises:
        MessageGoesOn: The other run has ended, and did the work of this message.
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
    met: HeldLock,
    try_begin: Callable[[], T | HeldLock],
    task: Any,
    request: Context,
    markers: Location,
) -> T:
    """
    Re-send the message of a claim that another run holds, unless that run ends at once.

    Args:
        met: The lock of the run that the message has met.
        try_begin: Starts the work and returns it, or the lock of the run that is doing it.
        markers: Where to keep the markers of copies.

    Raises:
        WillBeRedelivered: A copy of the message is on its way.
    """
    waits_until = time.monotonic() + OWN_RUN_WAIT
    begun: T | HeldLock = met
    while isinstance(begun, HeldLock):
        # A retry without delay may arrive before the run that sent it has ended.
        if begun.holder.task_id != request.id or time.monotonic() > waits_until:
            requeue_self(task, request, begun, markers, of_claim=True)
        time.sleep(PAUSE)
        begun = try_begin()
    return begun


def delete_markers(
    task: Any, request: Context, markers: Location, *, of_claim: bool = False
) -> None:
    """Delete the marker of this re-sent copy, which is running now; other messages have none."""
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


def mark_if_done(
    task: Any, request: Context, lease: Lease[Store], error: BaseException | None
) -> None:
    """
    Mark the end of a run, whose lock had this lease, for the copy of its message that waits for it.

    If the process is killed before this, the work is done again.

    Args:
        error: The error that ended the run; None: no error.
    """
    # If the run was killed or its message put back, the message or its copy must run again.
    killed = error is not None and not isinstance(error, Exception)
    if not (killed or isinstance(error, WillBeRedelivered) or is_requeued(error)):
        mark_ended(task, request, lease.store, lease.token)


def mark_ended(task: Any, request: Context, store: Store, run_token: str) -> None:
    """Set the marker that tells a copy of the message that the run it waits for has ended."""
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
    """Return the name of the marker for a copy of this very message that is on its way."""
    return f"{task.name}:{name}:{request.id}:{_attempt(request)}"


def _end_marker(task: Any, run_token: str) -> str:
    return f"{task.name}:ended:{run_token}"


def _longest_marker(task: Any) -> float:
    return _longest_delay(task) + visibility_timeout(task.app)


def _attempt(request: Context) -> str:
    # A retry, or the replacement of a run, is another message with the same id.
    return f"{request.retries or 0}.{request.replaced_task_nesting or 0}"


def _set_marker(
    store: Store, name: str, token: str, seconds: float, holder: Holder, old: str | None
) -> None:
    """
    Set a marker that lasts ``seconds``.

    Args:
        old: Token of the marker to replace; a marker with any other token is newer, and stays.
    """
    try:
        seconds = store.nearest_lease(seconds)
        outcome = store.acquire(name, token, seconds, holder)
        if isinstance(outcome, Acquired):
            # The marker may have existed before, with less time left.
            store.extend([Renewal(name, token, seconds)])
        elif outcome.token == old:
            store.release(name, outcome.token)
            store.acquire(name, token, seconds, holder)
    except LockBackendError as error:
        # Without the marker another delivery may send one more copy, or a copy runs in vain.
        logger.warning("The marker of a task's copy could not be set: %s", error)


def _send(task: Any, request: Context, signature: Any) -> None:
    for name in ("argsrepr", "kwargsrepr"):
        # Otherwise Celery would compute it again, and reveal redacted arguments.
        if isinstance(shown := getattr(request, name, None), str):
            signature.options[name] = shown
    try:
        with resending(request.id, unchanged=True):
            signature.apply_async()
    except Exception as error:
        # With acks_late the broker still has the message and can redeliver it;
        # without, the task visibly fails with this error.
        if task.acks_late:
            raise Rejected(error, requeue=True) from error
        raise


def _longest_delay(task: Any) -> float:
    """
    Return how long a message may wait for its ETA: half the visibility timeout.

    The broker redelivers a message that waits longer than the timeout, so copies multiply.
    """
    return visibility_timeout(task.app) / 2


def visibility_timeout(app: Any) -> float:
    """Return after how many seconds the app's kind of broker redelivers a message."""
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
