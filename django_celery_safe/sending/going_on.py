"""Continuing a carried task with other messages, whose rows are written before they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery.exceptions import SoftTimeLimitExceeded
from django.db import transaction

from .capture import Captured
from .message_table import message_table
from .outbox import keep, rewrite
from .sender import OutboxSender


@contextmanager
def ending(using: str) -> Iterator[None]:
    """
    Open the transaction in which a run ends.

    A soft time limit that interrupts a publication after its commit is no longer the run's
    outcome: the row says another one, and a relay sends what was not sent.
    """
    is_committed: list[bool] = []
    try:
        with transaction.atomic(using=using):
            # Before the publications, which are made in the order of their registration.
            transaction.on_commit(lambda: is_committed.append(True), using=using)
            yield
    except SoftTimeLimitExceeded:
        if not is_committed:
            raise


def publish_again(
    using: str, name: str, token: str, task_id: str, captured: Captured, *, other_work: bool
) -> bool:
    """
    Continue a carried task with other messages: those of a retry or of a replacement.

    A message with the task's id is written into the task's row; any other message gets a new
    row. If no message has the task's id, the task's row ends.

    Args:
        name: The attempt of the task that its row is for.
        token: The token of the run's claim.
        other_work: Whether the messages are for other work, so that a result that this task was
            finished with does not count for them.

    Returns:
        Whether the claim still held the row.
    """
    own = [one for one in captured.messages if one.task_id == task_id][:1]
    others = [one for one in captured.messages if one not in own]
    with ending(using):
        sender = OutboxSender.join(using)
        if own:
            ours = rewrite(sender, own[0], name, token, other_work=other_work)
        else:
            ours = message_table(using).end(name, token)
        if ours and others:
            keep(sender, Captured(others, captured.chord_calls), goes_on=True)
    return ours
