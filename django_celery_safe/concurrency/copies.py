"""
Sending the running task's message again.

Two cases: ``on_conflict="retry"`` comes back later; and a message that meets the
lock of its own task id (delivered again by the broker, or its own retry) comes
back when the lease is over, since the holder may be dead. The latter must not
multiply: of many deliveries of one id, at most one copy is on its way.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeAlias

from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry

from .. import conf
from ..exceptions import LockBackendError
from ..locks import HeldLock
from ..locks.lock import arguments_of
from ..locks.stores.base import Acquired, Holder, Renewal, Store
from ..signals import copy_dropped, emit, task_own_copy
from ..texts import get_logger
from .header import find_header, with_header
from .sent import find_sent

logger = get_logger(__name__)

#: What brokers with redelivery by time take for it when the project sets nothing, s
#: (kombu: transport/redis.py, transport/SQS).
VISIBILITY_TIMEOUT: Final = 3600.0
SQS_VISIBILITY_TIMEOUT: Final = 1800.0
#: Brokers that mark a message that they deliver again; SQS, for one, does not (kombu 5.7).
MARKING: Final = ("redis", "rediss", "sentinel", "amqp", "amqps", "pyamqp")
#: Shortest delay of a copy, s: the lease's end is known to the millisecond only.
SHORTEST_DELAY: Final = 0.05


#: In which field of the header a copy has its token, and under which name the note stands.
CopyName: TypeAlias = Literal["copy", "claim_copy"]


#: What is said of a message that no broker marked as delivered again.
_SENT_TWICE: Final = (
    " The broker does not say that it delivered the message again. If this id was given to two "
    "sends, they count as one message, and the second does not run: let Celery make the ids, or "
    "give each send its own."
)


class Rejected(Reject, Ignore):
    """
    A Reject that ``autoretry_for`` leaves alone.

    Celery's autoretry passes on only Ignore and Retry, and would retry a plain
    Reject; its tracer looks for Reject first (Celery 5.7).
    """


class ComesBack(Ignore):
    """An Ignore that ends a run whose message comes back: what it was to do is not done."""


class _Resent(NamedTuple):
    """
    Which sends are of the running task's own message.

    Attributes:
        task_id: Those with this id; None: all, such as the parts of what replaces it.
        unchanged: Whether it is the very message again, key and all.
    """

    task_id: str | None
    unchanged: bool


_resent: ContextVar[_Resent | None] = ContextVar("django_celery_safe_resent", default=None)


@contextmanager
def resending(task_id: str | None, *, unchanged: bool = False) -> Iterator[None]:
    """
    Mark the sends inside that are of the running task's own message, and never held back.

    Args:
        task_id: Its id, since receivers of Celery's signals may send other tasks; None: all.
        unchanged: Whether it is the very message again, key and all.
    """
    token = _resent.set(_Resent(task_id, unchanged))
    try:
        yield
    finally:
        _resent.reset(token)


def is_resending(task_id: str | None) -> bool:
    """Tell whether a send with this id is one of the running task's own message."""
    resent = _resent.get()
    return resent is not None and resent.task_id in (None, task_id)


def keeps_key(task_id: str | None) -> bool:
    """Tell whether a send with this id is the running task's very message, under its own key."""
    resent = _resent.get()
    return resent is not None and resent.unchanged and resent.task_id == task_id


def come_back(
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


def send_own_copy(
    task: Any, request: Context, contender: HeldLock, store: Store, *, of_claim: bool = False
) -> NoReturn:
    """
    See that one copy of the message comes back after the lease, and end this run.

    Two notes in the store tell the rest, both of this attempt alone: a retry has the
    same id. ``<task>:copy:<id>:<attempt>``, whose token the copy carries, says that
    it is on its way: a message is dropped only when another copy's note is there.
    ``<task>:met:<id>:<attempt>``, whose token the run that was met knows, is lengthened
    by that run when it ends: a copy that finds it so has nothing left to do. Dying or
    standing still between any two lines loses nothing: at worst two copies travel until
    the first of them arrives, or one runs that need not.

    A message that meets a claim of ``idempotent`` has a note of another name, since the
    same message may meet a lock too, and needs no ``met``: the record says what was done.

    Args:
        contender: Who holds what the message met.
        store: Where to keep the notes.
        of_claim: Whether that is a claim, not a lock.

    Raises:
        ComesBack: Always, if a copy is on its way.
    """
    name: CopyName = "claim_copy" if of_claim else "copy"
    note = _copy_note(task, request, name)
    header = find_header(request)
    carried = header.get(name)
    known = store.peek(note)
    if known is not None and known.token != carried:
        _leave_sent_lock(request)
        _tell(task, request, contender, None)
        raise ComesBack("Another copy of this message is on its way")
    left = contender.remaining
    if left is None:  # a store that can't tell
        left = conf.lease_seconds(conf.get("LOCK_TIMEOUT"), "LOCK_TIMEOUT")
    delay = min(max(left, SHORTEST_DELAY), _longest_delay(task))
    lasts = delay + visibility_timeout(task.app)
    token = os.urandom(16).hex()
    signature = task.signature_from_request(request, countdown=delay)
    again: Any = {**header, "task": task.name, name: token}
    arguments = arguments_of(request)
    holder = Holder(since=time.time(), task=task.name, task_id=request.id, arguments=arguments)
    if not of_claim:
        again["met"] = met = met_token(contender.token)
        # Before the copy, so that a run that ends right after this lengthens it in time. It
        # names the run's process, for the worker that learns of its death.
        run = holder._replace(host=contender.holder.host, pid=contender.holder.pid)
        met_before = store.peek(met_note(task, request))
        _note(store, met_note(task, request), met, lasts, run, met_before and met_before.token)
    # Celery's choice of the headers: RabbitMQ drops what still carries its x-death.
    signature.options.update(with_header(signature.options, again))
    _send(task, request, signature)
    _note(store, note, token, lasts, holder, carried)
    first = carried is None and _attempt(request) == "0.0"
    marked = _is_redelivered(request) or _broker_scheme(task.app) not in MARKING
    twice = first and not of_claim and not marked
    _tell(task, request, contender, delay, twice=twice)
    raise ComesBack(f"Met {contender.name!r}, which is held; a copy of the message comes back")


def drop_if_ended(task: Any, request: Context, store: Store) -> None:
    """
    End a copy at once if the run whose lock it waited for has ended by itself.

    Else every run that is longer than the broker's redelivery would be followed by
    another, without end. A store that can't tell how long a lock lasts proves nothing.

    Raises:
        Ignore: That run has ended, and the message is done.
    """
    met = store.peek(met_note(task, request))
    if met is None or met.token != find_header(request).get("met"):
        return
    if (met.remaining or 0.0) <= ended_for(task) / 2:
        return
    _leave_sent_lock(request)
    finish_copy(task, request, store)
    emit(
        copy_dropped,
        logger,
        logging.INFO,
        "Task %s[%s] was delivered again while it ran, and has ended since: its copy is dropped.",
        task.name,
        request.id,
        sender=send_own_copy,
        task=task.name,
        task_id=request.id,
    )
    raise Ignore("The run that this copy waited for has ended")


def finish_copy(task: Any, request: Context, store: Store, *, of_claim: bool = False) -> None:
    """Strike the notes of the copy that this message is, if it is one, now that it runs."""
    header = find_header(request)
    name: CopyName = "claim_copy" if of_claim else "copy"
    notes = [(_copy_note(task, request, name), header.get(name))]
    if not of_claim:
        notes.append((met_note(task, request), header.get("met")))
    try:
        for note, token in notes:
            if token:
                store.release(note, token)
    except LockBackendError as error:
        logger.warning(
            "The note of a task's copy could not be struck; it ends by itself: %s", error
        )


def met_note(task: Any, request: Context) -> str:
    """Return the name of the note that a run lengthens when it ends."""
    return f"{task.name}:met:{request.id}:{_attempt(request)}"


def met_token(run_token: str) -> str:
    """Return the token of that note: another than the run's, since each belongs to one lock."""
    return run_token[::-1]


def ended_for(task: Any) -> float:
    """Return the lease, s, of that note when the run has ended: twice the longest other."""
    return 2 * _longest_note(task)


def _longest_note(task: Any) -> float:
    return _longest_delay(task) + visibility_timeout(task.app)


def _copy_note(task: Any, request: Context, name: CopyName) -> str:
    return f"{task.name}:{name}:{request.id}:{_attempt(request)}"


def _attempt(request: Context) -> str:
    # A retry, and what replaces a run, are other messages of the same id.
    return f"{request.retries or 0}.{request.replaced_task_nesting or 0}"


def _note(
    store: Store, name: str, token: str, seconds: float, holder: Holder, old: str | None
) -> None:
    """
    Let a note be there for so many seconds.

    Args:
        old: Token of the note that it replaces; any other is left, since it is newer.
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
        # Without its note another delivery may send one more copy, or one runs in vain.
        logger.warning("A task's copy could not be noted: %s", error)


def _leave_sent_lock(request: Context) -> None:
    """Leave the message's lock to the other copy, or the other run, of the message."""
    if (sent := find_sent(request)) is not None:
        sent.settled = True


def _send(task: Any, request: Context, signature: Any) -> None:
    for name in ("argsrepr", "kwargsrepr"):
        # Else Celery would make it anew, and show what was redacted.
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


def _tell(
    task: Any, request: Context, contender: HeldLock, delay: float | None, *, twice: bool = False
) -> None:
    emit(
        task_own_copy,
        logger,
        logging.WARNING if twice else logging.INFO,
        "Task %s[%s] was delivered while %r is held by %s: %s.%s",
        task.name,
        request.id,
        contender.name,
        contender.holder,
        "another copy is on its way" if delay is None else f"a copy comes back in {delay:.3g} s",
        _SENT_TWICE if twice else "",
        sender=send_own_copy,
        name=contender.name,
        task_id=request.id,
        holder=str(contender.holder),
        delay=delay,
    )
