"""Fixtures: published messages, separate Celery apps, and receivers of signals."""

import gc
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from django.db import connections, transaction

from django_celery_safe.databases import Now
from django_celery_safe.emitting import Event
from django_celery_safe.models import OutboxMessage
from django_celery_safe.models.outbox import OutboxMessages
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.kinds import kind_of
from tests.listening import handling, receiving
from tests.processes import dead_port
from tests.sending.carrying import Carried
from tests.sending.published import Published, Sent, take_published
from tests.servers import RedisServer

TABLE = OutboxMessage._meta.db_table
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
def sent(redis_server: RedisServer, broker: Celery) -> Sent:
    """Take what waits in the queues of the private Redis, which were empty before the test."""
    return lambda: take_published(redis_server)


def table(alias: str) -> OutboxMessages:
    """Return all rows of a database."""
    return OutboxMessage.objects.using(alias)


def make_due(alias: str) -> None:
    """Let all that is pending be due now."""
    table(alias).pending().update(due_at=Now() - timedelta(seconds=1))


@contextmanager
def dying_sender(alias: str, *, due: bool = False) -> Iterator[None]:
    """
    Commit what the block sends, as a process that is killed before it publishes it.

    Args:
        due: Let all that is pending be due after that.
    """
    with transaction.atomic(using=alias):
        yield
        connections[alias].run_on_commit.clear()
    if due:
        make_due(alias)


def ids(messages: list[Published]) -> list[str]:
    """Return the ids of messages."""
    return [message.id for message in messages]


@contextmanager
def rolled_back(using: str | None = None) -> Iterator[None]:
    """Roll the block's transaction back."""
    with transaction.atomic(using=using):
        yield
        transaction.set_rollback(True, using=using)


def refusing() -> str:
    """Return the URL of a Redis that is not there."""
    return f"redis://127.0.0.1:{dead_port()}/0"


#: Makes a Celery app of the test's own, with the shared tasks of the tests and a configuration
#: on top of the private Redis.
MakeApp = Callable[..., Celery]


@pytest.fixture
def make_app(redis_server: RedisServer) -> Iterator[MakeApp]:
    """Make Celery apps that nobody else uses, closed after the test."""
    redis_server.flush()
    with ExitStack() as stack:

        def make(**conf: Any) -> Celery:
            app = Celery("own", set_as_current=False)
            broker, results = (redis_server.database_url(number) for number in (1, 2))
            app.conf.update({"broker_url": broker, "result_backend": results, **conf})
            stack.callback(app.close)
            return app

        yield make


@pytest.fixture
def without_broker(make_app: MakeApp) -> Celery:
    """An app whose broker refuses connections."""
    return make_app(broker_url=refusing(), task_publish_retry_policy=ONE_TRY)


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A server that accepts, and answers nobody."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def count_calls(server: socket.socket) -> int:
    """Return how often somebody connected to a listening socket since the last time."""
    number = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            number += 1
    return number


@contextmanager
def hearing(*signals: Any) -> Iterator[list[dict[str, Any]]]:
    """Collect what Django's or Celery's signals, or events that are only logged, say meanwhile."""
    heard: list[dict[str, Any]] = []

    def hear(**said: Any) -> None:
        heard.append(said)

    with ExitStack() as stack:
        for signal in signals:
            if isinstance(signal, Event):
                stack.enter_context(handling(_FieldsHandler(signal, heard), signal.logger.name))
            else:
                stack.enter_context(receiving(signal, hear))
        yield heard


class _FieldsHandler(logging.Handler):
    """Collects the fields of an event's records."""

    def __init__(self, event: Event, heard: list[dict[str, Any]]) -> None:
        super().__init__()
        self.event, self.heard = event, heard

    def emit(self, record: logging.LogRecord) -> None:
        extra = vars(record).items()
        fields = {name[5:]: value for name, value in extra if name.startswith("safe_")}
        self.heard.append({"signal": self.event, **fields})


@pytest.fixture
def carried(
    request: pytest.FixtureRequest,
    mailbox: Mailbox,
    locks_in_memory: None,
    make_database: MakeDatabase,
) -> Carried:
    """A carried task, with its rows in the database of the run, or in one that a test names."""
    return Carried(mailbox, make_database(kind_of(request)))
