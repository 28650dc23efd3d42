"""Another holder of a lock, and the time left of a lease."""

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from django_celery_safe import HeldLock
from django_celery_safe.leases.holder import Holder
from django_celery_safe.locks.stores import get_store
from django_celery_safe.locks.stores.base import Acquired, LockRequest
from tests.locks.renewals import get_lock


@contextmanager
def held_by(
    name: str, task_id: str | None, seconds: float = 30, *, host: str = "elsewhere", pid: int = 4711
) -> Iterator[HeldLock]:
    """Let the run ``task_id`` in another process hold the lock during the block."""
    store, token = get_store(), uuid.uuid4().hex
    holder = Holder(host, pid, time.time(), True, "tests.other", task_id)
    assert isinstance(store.take(LockRequest(name, token, seconds, holder)), Acquired)
    yield get_lock(name)
    store.release(name, token)
