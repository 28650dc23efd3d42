"""Fixtures of the tests of locks: reported losses, and a Redis that they may stop."""

from collections.abc import Iterator

import pytest
from pytest_django import Settings

from django_celery_safe.signals import lock_lost
from tests.conftest import cache_at
from tests.servers import RedisServer


@pytest.fixture
def losses() -> Iterator[list[str]]:
    """The names of the locks that were told to be lost."""
    told: list[str] = []

    def listen(name: str, **fields: object) -> None:
        told.append(name)

    lock_lost.connect(listen)
    yield told
    lock_lost.disconnect(listen)


@pytest.fixture
def fragile_redis(settings: Settings) -> Iterator[RedisServer]:
    """A Redis of this test alone, to be stopped and started; locks live in it by django-redis."""
    with RedisServer() as server:
        settings.CACHES = cache_at(server.url)
        yield server
