"""A Redis that tests may stop, which others do not share."""

from collections.abc import Iterator

import pytest
from pytest_django import Settings

from tests.conftest import REDIS_BACKENDS, require
from tests.servers import RedisServer, ServerPool


@pytest.fixture
def fragile_redis(settings: Settings) -> Iterator[RedisServer]:
    """A Redis of this test alone, to be stopped and started; locks live in it by django-redis."""
    with ServerPool() as servers:
        server: RedisServer = require(servers, RedisServer)
        settings.CACHES = {
            "default": {"BACKEND": REDIS_BACKENDS["django-redis"], "LOCATION": server.url}
        }
        yield server
