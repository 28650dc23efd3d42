"""Fixtures: what is published, Celery apps of their own, and listening to signals."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import pytest
from celery import Celery

from tests.sending.published import Published, take_published
from tests.servers import RedisServer

#: Gives up at once where nobody listens.
ONE_TRY = {"max_retries": 0, "interval_start": 0, "interval_step": 0, "interval_max": 0}


@pytest.fixture(scope="module", autouse=True)
def connections_of_this_module(redis_server: RedisServer) -> Iterator[None]:
    """
    Forget results while the private Redis is there.

    A result unsubscribes when it is collected, and results of groups are cycles,
    collected after the server was stopped if not here.
    """
    yield
    gc.collect()


@pytest.fixture
def sent(redis_server: RedisServer, broker: Celery) -> Callable[[], list[Published]]:
    """Take what waits in the queues of the private Redis, which were empty before the test."""
    return lambda: take_published(redis_server)


class MakeApp(Protocol):
    """Makes a Celery app of the test's own, with the shared tasks of the tests."""

    def __call__(self, **conf: Any) -> Celery:
        """Return the app; ``conf`` is Celery's configuration on top of the private Redis."""


@pytest.fixture
def make_app(redis_server: RedisServer) -> Iterator[MakeApp]:
    """Make Celery apps that nobody else uses, closed after the test."""
    redis_server.flush()
    with ExitStack() as stack:

        def make(**conf: Any) -> Celery:
            app = Celery("own", set_as_current=False)
            app.conf.update(
                {
                    "broker_url": redis_server.database_url(1),
                    "result_backend": redis_server.database_url(2),
                    **conf,
                }
            )
            stack.callback(app.close)
            return app

        yield make


@contextmanager
def hearing(*signals: Any) -> Iterator[list[dict[str, Any]]]:
    """Collect what Django's or Celery's signals say during the block."""
    heard: list[dict[str, Any]] = []

    def hear(**said: Any) -> None:
        heard.append(said)

    for signal in signals:
        signal.connect(hear, weak=False)
    try:
        yield heard
    finally:
        for signal in signals:
            signal.disconnect(hear)
