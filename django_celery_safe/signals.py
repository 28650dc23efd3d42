"""
The app's signals, and :func:`emit`, the one door through which every event goes.

Each event is a Django signal and a log record with the same fields; the record
carries them in ``extra`` as ``safe_<field>``. docs/reference/signals.md lists them.
"""

from __future__ import annotations

import logging
from typing import Any

from django.dispatch import Signal

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
#: A run of a task met another run of the same. Fields: name, task_id, holder, on_conflict.
task_conflict = Signal()
#: A message met the lock of its own task id, or what it is to do once is being done. Fields:
#: name, task_id, holder, delay (s until its copy comes; None: dropped, because another copy of
#: the message is on its way).
task_own_copy = Signal()
#: A task was sent that was sent before and has not started, or ended, since. Fields: name,
#: task_id (of this send), sent_id (of the one before), published (whether it was sent all
#: the same, because a canvas waits for it).
task_duplicate = Signal()
#: A message that was a duplicate when it was sent did nothing. Fields: task, task_id, sent_id.
duplicate_skipped = Signal()
#: A message that waited for a commit was published. Fields: task, task_id.
task_sent = Signal()
#: A message that waited for a commit could not be published. Fields: task, task_id, error,
#: kept (whether the outbox has it; if not, it is lost).
task_send_failed = Signal()
#: A message of the outbox failed too often and is set aside. Fields: task, task_id, error, kept.
message_dead = Signal()
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
#: A message was sent to arrive later than its broker delivers it again. Fields: task, delay (s),
#: visibility_timeout (s), place (in the code).
sent_beyond_visibility = Signal()
#: A run of stages was started, and is committed. Fields: run (its id), stages (how many).
run_started = Signal()
#: A run's stage was begun: its steps are sent. Fields: run, stage (from 0 on), steps (how many).
stage_started = Signal()
#: A step of a run succeeded. Fields: run, step (its id), task, task_id.
step_succeeded = Signal()
#: A step of a run failed, after its retries. Fields: run, step, task, task_id, error.
step_failed = Signal()
#: A step was ours and is no longer. Fields: step (its id), holder (empty: not known).
step_lost = Signal()
#: A sweep found that a run did not go on, and repaired it. Fields: run, task, task_id (both
#: empty: all of its stage), reason.
run_repaired = Signal()
#: A run of stages ended. Fields: run, status.
run_ended = Signal()


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

    A receiver that raises harms nothing: its error is logged.

    Args:
        message: The record's text, with ``args`` for its ``%s``.
        sender: The signal's sender.
        exc_info: The error that the record shows with its traceback.
        fields: The event's fields.
    """
    if logger.isEnabledFor(level):
        extra = {f"safe_{name}": value for name, value in fields.items()}
        logger.log(level, message, *args, extra=extra, exc_info=exc_info)
    if not signal.receivers:
        return
    for receiver, outcome in signal.send_robust(sender=sender, **fields):
        if isinstance(outcome, Exception):
            logger.error("Receiver %r of an event raised.", receiver, exc_info=outcome)
