"""Fixtures for the tests on real workers; one worker serves all tests of a module."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from tests.app.celery import app
from tests.conftest import REDIS_BACKENDS, RedisCacheKind, _forget_first_use
from tests.processes import CeleryWorker, free_port
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
        redis_server.flush()
        broker = {
            "broker_url": redis_server.database_url(1),
            "result_backend": redis_server.database_url(2),
            "broker_transport_options": transport_options,
        }
        caches = {
            "default": {"BACKEND": REDIS_BACKENDS[locks], "LOCATION": redis_server.url},
            "gone": {
                "BACKEND": REDIS_BACKENDS["django"],
                "LOCATION": f"redis://127.0.0.1:{free_port()}",
            },
        }
        settings = {f"CELERY_{name.upper()}": value for name, value in broker.items()}
        with override_settings(CACHES=caches, **settings):
            _forget_first_use()
            app.conf.update(broker)
            with CeleryWorker("tests.app", concurrency=concurrency) as worker:
                yield worker
            app.conf.update(broker_transport_options={})

    return start


@pytest.fixture
def room(tmp_path: Path) -> Room:
    """A room for this test alone."""
    return Room(tmp_path)
