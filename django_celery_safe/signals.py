"""
The app's signals: each is sent by the event of the same name in ``events``, with its fields.

docs/reference/signals.md lists them, and the events that are only logged.
"""

from __future__ import annotations

from django.dispatch import Signal

lock_lost = Signal()
task_conflict = Signal()
task_duplicate = Signal()
task_sent = Signal()
task_send_failed = Signal()
message_dead = Signal()
message_done = Signal()
message_failed = Signal()
task_poisoned = Signal()
message_brought_back = Signal()
once_failed = Signal()
run_started = Signal()
step_failed = Signal()
run_ended = Signal()
claim_lost = Signal()
