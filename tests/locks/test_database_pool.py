"""Locks and claims in a database whose connections come from psycopg's pool."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
from django.db import connections
from pytest_django import Settings

from django_celery_safe import cache_lock, idempotent
from django_celery_safe.leases.renewer import renewer
from tests.clock import HeldClock


@pytest.fixture
def pooled(postgres_alias: str, settings: Settings) -> Iterator[str]:
    """The locks' database gives this process one connection at a time, and errors soon."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": postgres_alias}
    connection: Any = connections[postgres_alias]
    pool = {"min_size": 0, "max_size": 1, "timeout": 3}
    connection.settings_dict["OPTIONS"] = {"pool": pool}
    yield postgres_alias
    connection.close_pool()


def lock(alias: str) -> AbstractContextManager[Any]:
    """Return a lock that has to be renewed soon."""
    return cache_lock("pooled", timeout=30)


def claim(alias: str) -> AbstractContextManager[Any]:
    """Return a claim whose lease has to be renewed soon."""
    return idempotent("pooled", timeout=30, using=alias)


@pytest.mark.parametrize("hold", [lock, claim])
def test_renewal_does_not_wait_for_the_pool(
    hold: Callable[[str], AbstractContextManager[Any]], pooled: str, clock: HeldClock
) -> None:
    """A lease is renewed while its holder, or anyone else, has all connections of the pool."""
    with hold(pooled):
        connections[pooled].ensure_connection()
        (lease,) = [lease for lane in renewer.lanes.values() for lease in lane._leases]
        clock.advance(11)
        assert lease.remaining > 25
        connections[pooled].close()


def test_holders_leave_the_pool_to_others(pooled: str) -> None:
    """More threads hold locks at once than the pool has connections."""
    together = threading.Barrier(3)

    def hold(number: int) -> bool:
        with cache_lock(f"lock {number}") as lock:
            together.wait(20)
            return lock.held

    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(hold, range(3)))
