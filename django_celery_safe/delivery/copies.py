"""
Re-sending the running task's message.

There are two cases. With ``on_conflict="retry"``, a message that finds the lock held is re-sent
to arrive later. A message that finds the lock held under its own task id (redelivered by the
broker, or its own retry) is re-sent to arrive when the lease has expired, because the holder may
be dead. If that run was alive, and longer than the broker's redelivery time, it leaves a marker
at its end, and the copy finds nothing left to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from .. import conf
from ..events import TASK_NOT_RUN, TASK_OWN_COPY
from ..exceptions import LockBackendError, LockLost
from ..leases.holder import Holder
from ..leases.lease import Lease, clock
from ..locks import HeldLock
from ..locks.stores.base import LockRequest, Store
from ..texts import get_logger
from .header import HEADER, get_header

T = TypeVar("T")

logger = get_logger(__name__)

#: The default visibility timeout, s, of brokers that redeliver after some time (kombu:
#: transport/redis.py, transport/SQS).
VISIBILITY_TIMEOUT: Final = 3600.0
SQS_VISIBILITY_TIMEOUT: Final = 1800.0
#: Seconds that a message waits for the run of its own task id before it is re-sent: a retry
#: without delay may arrive before the run that sent it has ended.
OWN_RUN_WAIT: Final = 0.5
#: How long the end of a long run is marked, s: a redelivered message may wait in its queue.
MARK_LASTS: Final = 24 * 3600.0
#: Shortest delay of a copy, s: the lease's end is known only to the millisecond.
SHORTEST_DELAY: Final = 0.05


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


def resending(task_id: str | None, send: Callable[[], T], *, unchanged: bool = False) -> T:
    """
    Call ``send``, whose sends re-send the running task, and so are never held back.

    Args:
        task_id: The id of the running task, because receivers of Celery's signals may send
            other tasks; None: all sends are meant.
        unchanged: Whether the message is the same in everything, including the key.
    """
    # In a context of its own: a signal handler that raises can't leave this one so.
    context = copy_context()
    context.run(_resent.set, Resent(task_id, unchanged))
    return context.run(send)


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
    delay, signature = _send(task, request, delay)
    raise Retry(why, when=delay, sig=signature)  # type: ignore[arg-type]


def requeue_self(task: Any, request: Context, contender: HeldLock) -> NoReturn:
    """
    Send a copy of the message that arrives after the contender's lease, and end this run.

    The delay is at most half the time after which the broker redelivers a message, so a waiting
    copy is not redelivered itself.

    Args:
        contender: The holder that the message found.

    Raises:
        WillBeRedelivered: The copy is on its way.
    """
    left = contender.remaining
    if left is None:  # the store does not report it
        left = conf.get("LOCK_TIMEOUT")
    delay, _ = _send(task, request, max(left, SHORTEST_DELAY), copy=True)
    facts = {"name": contender.name, "task": task.name, "task_id": request.id}
    TASK_OWN_COPY.emit(requeue_self, **facts, holder=str(contender.holder), delay=delay)
    raise WillBeRedelivered(f"Met {contender.name!r}, which is held; a copy comes back")


def drop_if_run_ended(task: Any, request: Context, store: Store) -> None:
    """
    End the run of a message that was redelivered, or re-sent, if an earlier run has ended.

    Otherwise every run that is longer than the broker's redelivery time would be followed
    by another run, without end.

    Raises:
        MessageGoesOn: An earlier run of the message has ended.
    """
    if store.peek(_end_marker(task, request)) is not None:
        refuse_run(task, request, "an earlier run of this message has ended")


def refuse_run(task: Any, request: Context, reason: str) -> NoReturn:
    """
    Report why a task is not run for its message.

    Raises:
        MessageGoesOn: Always.
    """
    TASK_NOT_RUN.emit(refuse_run, task=task.name, task_id=request.id, reason=reason)
    raise MessageGoesOn(f"Not run: {reason}")


def run_and_mark(task: Any, request: Context, lease: Lease[Store], work: Callable[[], T]) -> T:
    """Run, and mark the end of the run for deliveries of its message that may still come."""
    began_at = clock.now()
    try:
        result = work()
    except Exception as error:
        # If its message was put back, or its work given up, another run has to do it.
        if not isinstance(error, WillBeRedelivered | LockLost) and not is_requeued(error):
            mark_end(task, request, lease.store, clock.now() - began_at)
        raise
    mark_end(task, request, lease.store, clock.now() - began_at)
    return result


def mark_end(task: Any, request: Context, store: Store, seconds: float) -> bool:
    """
    Mark that a run of ``seconds`` has ended, if the broker may have redelivered its message.

    Returns:
        Whether a later delivery of the message is dropped.
    """
    if seconds < _longest_delay(task):
        return False
    holder = Holder(since=time.time(), task=task.name, task_id=request.id)
    lasts = store.nearest_lease(MARK_LASTS)
    try:
        store.take(LockRequest(_end_marker(task, request), os.urandom(16).hex(), lasts, holder))
    except LockBackendError as error:
        logger.warning("The end of %s[%s] could not be marked: %s", task.name, request.id, error)
        return False
    return True


def _end_marker(task: Any, request: Context) -> str:
    # A retry, or the replacement of a run, is another message with the same id.
    attempt = f"{request.retries or 0}.{request.replaced_task_nesting or 0}"
    return f"{task.name}:ended:{request.id}:{attempt}"


def _send(task: Any, request: Context, delay: float, **fields: Any) -> tuple[float, Any]:
    """Re-send the message; return its delay and signature. ``fields`` are added to its header."""
    delay = min(delay, _longest_delay(task))
    signature = task.signature_from_request(request, countdown=delay)
    if fields:
        header = {**get_header(request), "task": task.name, **fields}
        signature.options["headers"] = {**(signature.options.get("headers") or {}), HEADER: header}
    for name in ("argsrepr", "kwargsrepr"):
        # Otherwise Celery would compute it again, and reveal redacted arguments.
        if isinstance(shown := getattr(request, name, None), str):
            signature.options[name] = shown
    try:
        resending(request.id, signature.apply_async, unchanged=True)
    except Exception as error:
        # With acks_late the broker still has the message and can redeliver it;
        # without, the task visibly fails with this error.
        if task.acks_late:
            raise Rejected(error, requeue=True) from error
        raise
    return delay, signature


def _longest_delay(task: Any) -> float:
    """
    Return how long a message may wait for its ETA: half the visibility timeout.

    The broker redelivers a message that waits longer than the timeout, so copies multiply.
    """
    return visibility_timeout(task.app) / 2


def visibility_timeout(app: Any) -> float:
    """Return after how many seconds the app's kind of broker redelivers a message."""
    options = app.conf.broker_transport_options or {}
    urls = app.conf.broker_write_url or app.conf.broker_url or ""
    is_sqs = str(urls if isinstance(urls, str) else urls[0]).startswith("sqs:")
    default = SQS_VISIBILITY_TIMEOUT if is_sqs else VISIBILITY_TIMEOUT
    return float(options.get("visibility_timeout", default))
