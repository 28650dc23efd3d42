"""Helpers for tests in which relays race in processes of their own."""

from typing import Any

from django_celery_safe.models import OutboxMessage, OutboxMessages
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
