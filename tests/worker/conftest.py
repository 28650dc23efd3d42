"""Fixtures for the tests on real workers; one worker serves all tests of a module."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RedisCacheKind, app_on_redis
from tests.processes import CeleryWorker
from tests.servers import RedisServer
from tests.worker.rooms import Room

StartWorker = Callable[..., AbstractContextManager[CeleryWorker]]


@pytest.fixture(scope="module")
def start_worker(redis_server: RedisServer) -> StartWorker:
    """Start a prefork worker whose locks, broker and results are in the private Redis."""

    @contextmanager
    def start(
        locks: RedisCacheKind, concurrency: int, **transport_options: Any
    ) -> Iterator[CeleryWorker]:
        with (
            app_on_redis(redis_server, locks, **transport_options),
            CeleryWorker("tests.app", concurrency=concurrency) as worker,
        ):
            yield worker

    return start


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """A room for this test alone."""
    return Room(tmp_path)
