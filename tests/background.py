"""Work that a worker's main process does in background threads, as seen by a test."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db.backends.signals import connection_created

from django_celery_safe.delivery import endings
from tests.listening import receiving


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
