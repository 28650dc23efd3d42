"""Helpers of the tests of relays: races in several processes, and brokers that are silent."""

import socket
from contextlib import suppress
from typing import Any

from django_celery_safe.models import OutboxMessage
from django_celery_safe.models.message_states import OutboxMessages
from tests.processes import meet


def meet_once_claimed() -> None:
    """Let the relay of this process wait, with its first rows, until all others have some."""
    original = OutboxMessages.claim

    def claim(rows: OutboxMessages, *args: Any, **options: Any) -> list[OutboxMessage]:
        OutboxMessages.claim = original  # type: ignore[method-assign]
        claimed = rows.claim(*args, **options)
        meet()
        return claimed

    OutboxMessages.claim = claim  # type: ignore[method-assign]


def count_calls(server: socket.socket) -> int:
    """Return how often somebody connected to a listening socket since the last time."""
    number = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            number += 1
    return number
