"""Work in other threads: of a test, and of a worker's main process, as seen by a test."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

from django.db import connections
from django.db.backends.signals import connection_created

from django_celery_safe.delivery import endings
from tests.listening import receiving


def elsewhere(alias: str, act: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
    """Begin something in another thread, which has a connection of its own to a database."""

    def run() -> Any:
        with closing(connections[alias]):
            return act(*args, **options)

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def settle() -> None:
    """Wait until all that signals of Celery's have started in the background is done."""
    if endings._background is not None:
        endings._background.shutdown(wait=True)
        endings._background = None


@contextmanager
def before_its_update(act: Callable[[], object]) -> Iterator[None]:
    """
    Act once when a background thread is about to change what it has just looked at.

    The thread opens a connection of its own; ``act`` uses that connection.
    """
    left = [act]

    def wrap(execute: Any, sql: str, *args: Any) -> Any:
        if sql.startswith("UPDATE") and left:
            left.pop()()
        return execute(sql, *args)

    def watch(connection: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            connection.execute_wrappers.append(wrap)

    with receiving(connection_created, watch):
        yield
        settle()
    assert not left, "nothing was changed"
