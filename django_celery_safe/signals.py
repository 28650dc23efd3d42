"""
The app's signals, and :func:`emit`, the one door through which every event goes.

Each event is a Django signal and a log record with the same fields; the record
carries them in ``extra`` as ``safe_<field>``. docs/reference/signals.md lists them.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from queue import Queue
from typing import Any, Final

from django.db import connections
from django.dispatch import Signal

from .exceptions import find_time_limit

#: A lock was acquired. Fields: name, fence.
lock_acquired = Signal()
#: A lock was wanted and someone else holds it. Fields: name, holder.
lock_contended = Signal()
#: A lock was given back by its holder. Fields: name.
lock_released = Signal()
#: A lock was ours and is no longer. Fields: name, holder (empty if not known).
lock_lost = Signal()
#: A lock could not be given back or renewed; it ends by its lease. Fields: name, reason.
lock_backend_failed = Signal()
#: Somebody freed a lock that was held, by ``release_lock()``. Fields: name, holder (who had it).
lock_freed = Signal()
#: The lock that a message holds since it was sent ended while its task ran, so that the same may
#: be sent again. Fields: name, holder (empty if not known).
sent_lock_lost = Signal()
#: A run of a task met another run of the same. Fields: name, task_id, holder, on_conflict.
task_conflict = Signal()
#: A message met the lock of its own task id, or what it is to do once is being done. Fields:
#: name, task_id, holder, delay (s until its copy comes; None: dropped, because another copy of
#: the message is on its way).
task_own_copy = Signal()
#: A copy of a message did nothing, since the run for which it waited has ended. Fields: task,
#: task_id.
copy_dropped = Signal()
#: A task was sent that was sent before and has not started, or ended, since. Fields: name,
#: task_id (of this send), sent_id (of the one before), published (whether it was sent all
#: the same, because a canvas waits for it).
task_duplicate = Signal()
#: A message that was a duplicate when it was sent did nothing. Fields: task, task_id, sent_id.
duplicate_skipped = Signal()
#: A message that waited for a commit was published. Fields: task, task_id, relayed (whether a
#: relay did it, later, from the outbox).
task_sent = Signal()
#: A message that waited for a commit could not be published. Fields: task, task_id, error,
#: kept (whether the outbox has it; if not, it is lost).
task_send_failed = Signal()
#: A message of the outbox failed too often and is set aside. Fields: task, task_id, error, kept.
message_dead = Signal()
#: Somebody let a message that failed be tried again. Fields: task, task_id.
message_retried = Signal()
#: Somebody deleted a message that was not sent, and never will be. Fields: task, task_id.
message_discarded = Signal()
#: A task was sent inside ``atomic()`` without waiting for its commit; see ``WARN_IN_ATOMIC``.
#: Fields: task, using (the database), place (in the code).
sent_in_atomic = Signal()
#: ``do_once`` did it. Fields: model, pk, flag.
done_once = Signal()
#: ``do_once`` found it done. Fields: model, pk, flag.
already_done = Signal()
#: A block of ``do_once`` failed under ``at_most_once``, and its flag stays set. Fields: model,
#: pk, flag, error.
once_failed = Signal()
#: What ``idempotent`` guards was done, and noted. Fields: key, task_id (None outside tasks).
claim_finished = Signal()
#: What ``idempotent`` guards was done already; its result was returned. Fields: key, task_id.
claim_repeated = Signal()
#: What ``idempotent`` guards failed, and may be done by the next. Fields: key, task_id, error.
claim_failed = Signal()
#: A claim was ours and is no longer. Fields: key, holder (empty: not known).
claim_lost = Signal()
#: Somebody forgot a record of ``idempotent``, so that its work may be done again. Fields: key,
#: state (running, done or failed).
record_forgotten = Signal()
#: A message was sent to arrive later than its broker delivers it again. Fields: task, delay (s),
#: visibility_timeout (s), place (in the code).
sent_beyond_visibility = Signal()
#: A run of stages was started, and is committed. Fields: run (its id), stages (how many).
run_started = Signal()
#: A run that had ended goes on, by ``resume()``. Fields: run, steps (how many are done again).
run_resumed = Signal()
#: A run's stage was begun: its steps are sent. Fields: run, stage (from 0 on), steps (how many).
stage_started = Signal()
#: A step of a run succeeded. Fields: run, step (its id), task, task_id.
step_succeeded = Signal()
#: A step of a run failed, after its retries. Fields: run, step, task, task_id, error.
step_failed = Signal()
#: A message of a step did nothing, since its step is not to run by it. Fields: step, task, task_id,
#: status (the step's; empty: it is gone).
step_skipped = Signal()
#: A step was ours and is no longer. Fields: step (its id), holder (empty: not known).
step_lost = Signal()
#: A sweep found that a run did not go on, and repaired it. Fields: run, task, task_id (both
#: empty: all of its stage), reason.
run_repaired = Signal()
#: A run of stages ended. Fields: run, status, error (why, if not by a step's error; else empty).
run_ended = Signal()


class _Telling(threading.local):
    """The signals whose receivers this thread runs now."""

    def __init__(self) -> None:
        self.signals: set[Signal] = set()


_telling = _Telling()
_aside: Queue[Any] | None = None
_aside_begins = threading.Lock()
#: Longest that a process which ends waits for receivers, s.
LAST_WORDS: Final = 2.0


def is_observed(signal: Signal, logger: logging.Logger, level: int) -> bool:
    """Tell whether anybody would notice an event; spares making it up on a hot path."""
    return bool(signal.receivers) or logger.isEnabledFor(level)


def emit(
    signal: Signal,
    logger: logging.Logger,
    level: int,
    message: str,
    *args: Any,
    sender: Any = None,
    exc_info: BaseException | None = None,
    **fields: Any,
) -> None:
    """
    Send an event's signal and write its log record.

    A receiver or a logging handler that raises harms nothing: Django logs the error of the
    one, and that of the other is printed, as ``logging`` does. What a receiver does may make
    an event of the same signal, which is logged and not sent: nothing goes round for ever.

    Args:
        message: The record's text, with ``args`` for its ``%s``.
        sender: The signal's sender.
        exc_info: The error that the record shows with its traceback.
        fields: The event's fields.

    Raises:
        SoftTimeLimitExceeded: It hit in a receiver or handler, and is meant for the task.
    """
    handled = find_time_limit(sys.exc_info()[1])
    errors: list[Exception] = []
    if logger.isEnabledFor(level):
        extra = {f"safe_{name}": value for name, value in fields.items()}
        try:
            # The record is to show the place of the event, not this one.
            logger.log(level, message, *args, extra=extra, exc_info=exc_info, stacklevel=2)
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            _print(error)
            errors.append(error)
    if signal.receivers and signal not in _telling.signals:
        _telling.signals.add(signal)
        try:
            outcomes = signal.send_robust(sender=sender, **fields)
            errors += [outcome for _, outcome in outcomes if isinstance(outcome, Exception)]
        except Exception as error:  # noqa: BLE001
            # It is Django's logging that failed: a partial has no name for it to show.
            _print(error)
            errors.append(error)
        finally:
            _telling.signals.discard(signal)
    for limit in filter(None, map(find_time_limit, errors)):
        if limit is not handled:
            raise limit


def aside(tell: Callable[..., object], *args: Any) -> None:
    """
    Tell of an event from a thread on which others depend.

    Receivers may be slow: they run in a thread of their own, one event after the other. A
    process that ends waits for them ``LAST_WORDS`` s at the most.
    """
    global _aside
    with _aside_begins:
        events = _aside
        if events is None:
            events = Queue()
            with suppress(RuntimeError):  # Python ends, and begins no thread
                threading.Thread(
                    target=_tell_aside,
                    args=(events,),
                    name="django_celery_safe events",
                    daemon=True,
                ).start()
                _aside = events
        is_told_here = _aside is None
    if is_told_here:
        tell(*args)
    else:
        events.put((tell, args))


def _tell_aside(events: Queue[Any]) -> None:
    while True:
        tell, args = events.get()
        with suppress(BaseException):
            tell(*args)
        del tell, args  # a lease that nobody refers to is not renewed
        connections.close_all()  # this thread's, which may be dead by the next time
        events.task_done()


@atexit.register
def _finish_aside() -> None:
    ends_at = time.monotonic() + LAST_WORDS
    while _aside is not None and _aside.unfinished_tasks and time.monotonic() < ends_at:
        time.sleep(0.01)


def _print(error: Exception) -> None:
    # Not by a logger: that is what has failed.
    if logging.raiseExceptions:
        with suppress(Exception):
            traceback.print_exception(error)


def _forget_parent() -> None:
    # The parent's threads are not this process's.
    global _aside, _aside_begins
    _aside, _aside_begins = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
