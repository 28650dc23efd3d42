"""Fixtures for the tests on real workers; one worker serves all tests of a module."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.test import override_settings

from tests.conftest import REDIS_BACKENDS, RedisCacheKind, app_on_redis
from tests.processes import CeleryWorker, dead_port
from tests.servers import RedisServer
from tests.worker.pools import POOLS
from tests.worker.rooms import Room

StartWorker = Callable[..., AbstractContextManager[CeleryWorker]]


@pytest.fixture(scope="module")
def start_worker(redis_server: RedisServer) -> StartWorker:
    """Start a prefork worker whose locks, broker and results are in the private Redis."""

    @contextmanager
    def start(
        locks: RedisCacheKind, concurrency: int, **transport_options: Any
    ) -> Iterator[CeleryWorker]:
        gone = {
            "BACKEND": REDIS_BACKENDS["django"],
            "LOCATION": f"redis://127.0.0.1:{dead_port()}",
        }
        with (
            app_on_redis(redis_server, locks, **transport_options),
            override_settings(CACHES={**settings.CACHES, "gone": gone}),
            CeleryWorker("tests.app", concurrency=concurrency) as worker,
        ):
            yield worker

    return start


@pytest.fixture
def rooms(tmp_path: Path) -> Iterator[dict[str, Room]]:
    """A room for the tasks of each pool, open in the end."""
    rooms = {pool: Room(tmp_path / pool) for pool in POOLS}
    for room in rooms.values():
        room.folder.mkdir()
    yield rooms
    for room in rooms.values():
        room.open()


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """A room for this test alone."""
    return Room(tmp_path)
