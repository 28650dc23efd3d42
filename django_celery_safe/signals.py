"""
The app's signals: when each is sent, and with which fields, stands in ``events``.

docs/reference/signals.md lists them all.
"""

from __future__ import annotations

from . import events

lock_acquired = events.LOCK_ACQUIRED.signal
lock_contended = events.LOCK_CONTENDED.signal
lock_released = events.LOCK_RELEASED.signal
lock_lost = events.LOCK_LOST.signal
lock_backend_failed = events.LOCK_NOT_RELEASED.signal
lock_freed = events.LOCK_FREED.signal
task_conflict = events.TASK_CONFLICT.signal
task_duplicate = events.TASK_DUPLICATE.signal
task_sent = events.TASK_SENT.signal
task_send_failed = events.TASK_LOST.signal
message_brought_back = events.MESSAGE_BROUGHT_BACK.signal
message_done = events.MESSAGE_DONE.signal
message_failed = events.MESSAGE_FAILED.signal
message_lost = events.MESSAGE_LOST.signal
task_poisoned = events.TASK_POISONED.signal
message_dead = events.MESSAGE_DEAD.signal
message_retried = events.MESSAGE_RETRIED.signal
message_discarded = events.MESSAGE_DISCARDED.signal
sent_in_atomic = events.SENT_IN_ATOMIC.signal
done_once = events.DONE_ONCE.signal
already_done = events.ALREADY_DONE.signal
once_failed = events.ONCE_FAILED.signal
claim_finished = events.CLAIM_FINISHED.signal
claim_repeated = events.CLAIM_REPEATED.signal
claim_failed = events.CLAIM_FAILED.signal
claim_lost = events.CLAIM_LOST.signal
record_forgotten = events.RECORD_FORGOTTEN.signal
run_started = events.RUN_STARTED.signal
run_resumed = events.RUN_RESUMED.signal
stage_started = events.STAGE_STARTED.signal
step_succeeded = events.STEP_SUCCEEDED.signal
step_failed = events.STEP_FAILED.signal
step_lost = events.STEP_LOST.signal
run_repaired = events.RUN_REPAIRED.signal
run_ended = events.RUN_ENDED.signal
