"""
Sending the running task's message again.

Two cases: ``on_conflict="retry"`` comes back later; and a message that meets the
lock of its own task id (delivered again by the broker, or its own retry) comes
back when the lease is over, since the holder may be dead. The latter must not
multiply: of many deliveries of one id, at most one copy is on its way.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final, NoReturn

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from .. import conf
from ..exceptions import LockBackendError
from ..locks import HeldLock
from ..locks.stores import locate
from ..locks.stores.base import Holder, Store
from ..signals import emit, task_own_copy

logger = logging.getLogger(__name__)

#: The message header in which all that is ours travels, as a dict.
HEADER: Final = "django_celery_safe"
#: What brokers with redelivery by time take for it when the project sets nothing, s
#: (kombu: transport/redis.py).
VISIBILITY_TIMEOUT: Final = 3600.0
#: Shortest delay of a copy, s: the lease's end is known to the millisecond only.
SHORTEST_DELAY: Final = 0.05


class Rejected(Reject, Ignore):
    """
    A Reject that ``autoretry_for`` leaves alone.

    Celery's autoretry passes on only Ignore and Retry, and would retry a plain
    Reject; its tracer looks for Reject first (Celery 5.7).
    """


class _Resend(Enum):
    """What a send has to do with the running task's own message."""

    NONE = 0
    AGAIN = 1
    UNCHANGED = 2


_resending: ContextVar[_Resend] = ContextVar("django_celery_safe_resending", default=_Resend.NONE)


@contextmanager
def resending(*, unchanged: bool = False) -> Iterator[None]:
    """
    Mark every send inside as a re-send of the running task, which is never held back.

    Args:
        unchanged: Whether it is the very message again, key and all.
    """
    token = _resending.set(_Resend.UNCHANGED if unchanged else _Resend.AGAIN)
    try:
        yield
    finally:
        _resending.reset(token)


def is_resending() -> bool:
    """Tell whether the send at hand is one of the running task's own message."""
    return _resending.get() is not _Resend.NONE


def keeps_key() -> bool:
    """Tell whether the send at hand is the running task's very message, under its own key."""
    return _resending.get() is _Resend.UNCHANGED


def find_header(request: Context | None) -> Mapping[str, Any]:
    """Return what travels in our header of the message; empty without one."""
    headers = {} if request is None else request.headers or {}
    found = headers.get(HEADER)
    return found if isinstance(found, Mapping) else {}


def come_back(task: Any, request: Context, delay: float) -> NoReturn:
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
    _send(task, signature)
    raise Retry("Another run holds the lock", when=delay, sig=signature)  # type: ignore[arg-type]


def send_own_copy(
    task: Any, request: Context, contender: HeldLock, cache: str | conf.Unset
) -> NoReturn:
    """
    See that one copy of the message comes back after the lease, and end this run.

    Which copy is on its way is noted in the lock store, as the lock
    ``<task>:copy:<id>`` whose token the copy carries. It is noted only after
    the copy was published, and a message is dropped only when another copy's
    note is there, so dying between any two lines loses nothing: at worst two
    copies travel until the first of them arrives.

    Raises:
        Ignore: Always, if a copy is on its way.
    """
    store = locate(cache).store()
    note = _note_name(task.name, request.id)
    carried = find_header(request).get("copy")
    known = store.peek(note)
    if known is not None and known.token != carried:
        _tell(task, request, contender, None)
        raise Ignore("Another copy of this message is on its way")
    left = contender.remaining
    if left is None:  # a store that can't tell
        left = conf.lease_seconds(conf.get("LOCK_TIMEOUT"), "LOCK_TIMEOUT")
    delay = min(max(left, SHORTEST_DELAY), _longest_delay(task))
    token = uuid.uuid4().hex
    signature = task.signature_from_request(request, countdown=delay)
    # Celery's choice of the headers: RabbitMQ drops what still carries its x-death.
    headers = signature.options.get("headers") or {}
    signature.options["headers"] = {**headers, HEADER: {**find_header(request), "copy": token}}
    _send(task, signature)
    holder = Holder(since=time.time(), task=task.name, task_id=request.id)
    _note_copy(store, note, carried, token, delay + _visibility_timeout(task), holder)
    _tell(task, request, contender, delay)
    raise Ignore("Met the lock of its own task id; a copy of the message comes back")


def finish_copy(task: Any, request: Context, cache: str | conf.Unset) -> None:
    """Strike the note of the copy that this message is, now that it runs."""
    carried = find_header(request).get("copy")
    if carried is None:
        return
    try:
        locate(cache).store().release(_note_name(task.name, request.id), carried)
    except LockBackendError as error:
        logger.warning(
            "The note of a task's copy could not be struck; it ends by itself: %s", error
        )


def _note_copy(
    store: Store, note: str, carried: str | None, token: str, seconds: float, holder: Holder
) -> None:
    try:
        if carried is not None:
            store.release(note, carried)
        store.acquire(note, token, seconds, holder)
    except LockBackendError as error:
        # The copy is published; without its note another delivery may send one more.
        logger.warning("A task's copy was sent but could not be noted: %s", error)


def _send(task: Any, signature: Any) -> None:
    try:
        with resending(unchanged=True):
            signature.apply_async()
    except Exception as error:
        # With acks_late the broker still has the message and can give it back;
        # without, the task fails with this error, where everyone can see it.
        if task.acks_late:
            raise Rejected(error, requeue=True) from error
        raise


def _note_name(task_name: str, task_id: str | None) -> str:
    return f"{task_name}:copy:{task_id}"


def _longest_delay(task: Any) -> float:
    """
    Return for how long a message may wait for its ETA: half the visibility timeout.

    One that waits longer than that timeout is delivered again by the broker, and multiplies.
    """
    return _visibility_timeout(task) / 2


def _visibility_timeout(task: Any) -> float:
    options = task.app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", VISIBILITY_TIMEOUT))


def _tell(task: Any, request: Context, contender: HeldLock, delay: float | None) -> None:
    emit(
        task_own_copy,
        logger,
        logging.INFO,
        "Task %s[%s] was delivered while its own lock is held by %s: %s.",
        task.name,
        request.id,
        contender.holder,
        "another copy is on its way" if delay is None else f"a copy comes back in {delay:.3g} s",
        sender=send_own_copy,
        name=contender.name,
        task_id=request.id,
        holder=str(contender.holder),
        delay=delay,
    )
