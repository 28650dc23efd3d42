"""Fixtures for single-instance tasks without a worker."""

from collections.abc import Iterator

import celery
import pytest

from tests.concurrency.mailbox import Mailbox
from tests.contract.conftest import use_store

__all__ = ["mailbox", "use_store"]


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    """A Celery app in memory, without tasks; it is the current one."""
    before = celery.current_app._get_current_object()
    mailbox = Mailbox()
    mailbox.app.set_current()
    yield mailbox
    mailbox.close()
    before.set_current()
