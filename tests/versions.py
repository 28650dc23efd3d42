"""Differences between versions of other packages that tests expect."""

from typing import Final

import celery
import kombu
import pytest

#: Celery 5.7 and later call a task's handlers in the main process when its child was killed at
#: the hard time limit, send a text as ``expires`` by protocol 1, and send models of pydantic.
IS_CELERY_57: Final = celery.VERSION[:2] >= (5, 7)
#: kombu 5.7 and later publish several messages in one request to Redis.
IS_KOMBU_57: Final = kombu.VERSION[:2] >= (5, 7)

needs_quick_redelivery = pytest.mark.skipif(
    not IS_KOMBU_57, reason="kombu before 5.7 looks for unacknowledged messages every 10 s only"
)
