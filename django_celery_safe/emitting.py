"""
Events: an event is a log record and, where somebody would connect to it, a signal.

:mod:`django_celery_safe.events` declares them all.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from queue import Queue
from typing import Any, Final

from django.db import connections, transaction
from django.dispatch import Signal

from . import signals
from .exceptions import find_soft_time_limit
from .texts import describe_error, get_logger

#: How a record shows a field that is empty or None.
_IF_EMPTY: Final = {
    "holder": "nobody known",
    "task_id": "(called directly)",
    "error": "a step failed",
    "name": "unnamed",
}


class Event:
    """
    An event that is logged, and sent as a signal if ``signals`` has one of its name.

    The logger ``django_celery_safe.<name>`` writes its record, which carries each field in
    ``extra`` as ``safe_<field>``. Receivers get the same fields.

    Args:
        name: The name of the event, and of its signal if it has one.
        level: The level of the log record.
        text: The text of the log record, with ``%(field)s`` for fields.
        more: The names of the fields that the text does not show, separated by spaces.

    Attributes:
        signal: The signal; None: the event is only logged.
        fields: The names of all fields of the event.
    """

    def __init__(self, name: str, level: int, text: str, *, more: str = "") -> None:
        self.name, self.level, self.text = name, level, text
        self.signal: Signal | None = getattr(signals, name, None)
        shown = re.findall(r"%\((\w+)\)", text)
        self.fields: Final = tuple(dict.fromkeys([*shown, *more.split()]))
        self.logger: Final = get_logger(f"django_celery_safe.{name}")

    def also(self, text: str = "", *, level: int | None = None) -> Event:
        """Return the same event with another text, another level, or both."""
        return Event(self.name, level or self.level, text or self.text, more=" ".join(self.fields))

    def emit(self, sender: Any, /, *, exc_info: BaseException | None = None, **fields: Any) -> None:
        """
        Write the event's log record and send its signal.

        If a receiver raises, Django logs the error. If a logging handler raises, the error is
        printed, as ``logging`` does. Neither affects the caller. If a receiver causes the same
        event, that event is logged but not sent, which prevents an endless loop.

        Args:
            sender: The signal's sender.
            exc_info: The error that the record shows with its traceback.
            fields: The event's fields.

        Raises:
            SoftTimeLimitExceeded: The task's limit was reached inside a receiver or handler.
        """
        outer, failures = sys.exc_info()[1], list[Exception]()
        if self.logger.isEnabledFor(self.level):
            with _collecting(failures):
                self.logger.log(
                    self.level,
                    self.text,
                    {name: _show(name, value) for name, value in fields.items()},
                    extra={f"safe_{name}": value for name, value in fields.items()},
                    exc_info=exc_info,
                    stacklevel=2,  # the record shows the place where the event was emitted
                )
        signal = self.signal
        if signal is not None and signal.receivers and signal not in (before := _sending.get()):
            _sending.set(before | {signal})
            try:
                # Django logs an error with the receiver's name, and raises if a partial has none.
                with _collecting(failures):
                    outcomes = signal.send_robust(sender=sender, **fields)
                    failures += [error for _, error in outcomes if isinstance(error, Exception)]
            finally:
                _sending.set(before)
        for failure in failures:
            if (limit := find_soft_time_limit(failure, outer)) is not None:
                raise limit

    def emit_on_commit(self, sender: Any, /, *, using: str, **fields: Any) -> None:
        """Emit the event when the database's open transaction commits; not after a rollback."""
        transaction.on_commit(partial(self.emit, sender, **fields), using=using)


def _show(name: str, value: Any) -> Any:
    if isinstance(value, BaseException):
        return describe_error(value)
    return _IF_EMPTY.get(name, value) if value is None or value == "" else value


@contextmanager
def _collecting(failures: list[Exception]) -> Iterator[None]:
    """Print an error of the block and add it to ``failures`` instead of raising it."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - a handler may raise anything
        failures.append(error)
        # Not with a logger, because logging has just failed.
        if logging.raiseExceptions:
            with suppress(Exception):
                traceback.print_exception(error)


#: The signals whose receivers run now.
_sending: ContextVar[frozenset[Signal]] = ContextVar("sending", default=frozenset())

#: Longest time that a process waits for receivers when it exits, s.
EXIT_FLUSH_TIMEOUT: Final = 2.0


#: The events that a thread of their own emits, one after the other.
_waiting: Queue[Any] = Queue()


def emit_in_background(emit: Callable[..., object], *args: Any) -> None:
    """
    Emit an event for a thread that must not be delayed.

    Receivers may be slow, so they run in a separate thread, one event after the other. An
    exiting process waits for them at most ``EXIT_FLUSH_TIMEOUT`` s.
    """
    _waiting.put((emit, args))
    with suppress(RuntimeError):  # no thread can be started now: the next event may start it
        _start_thread()


@cache
def _start_thread() -> None:
    """Start the thread, unless it runs already."""
    threading.Thread(target=_emit_waiting, name="django_celery_safe events", daemon=True).start()


def _emit_waiting() -> None:
    while True:
        emit, args = _waiting.get()
        with suppress(BaseException):
            emit(*args)
        del emit, args  # a reference would keep the renewal of a lease running
        # This thread's connections may be dead by the next event. A connection that can't be
        # closed must not end the thread, because all later events need it.
        with suppress(Exception):
            connections.close_all()
        _waiting.task_done()


@atexit.register
def _flush() -> None:
    ends_at = time.monotonic() + EXIT_FLUSH_TIMEOUT
    while _waiting.unfinished_tasks and time.monotonic() < ends_at:
        time.sleep(0.01)


def _forget_parent() -> None:
    # The parent's threads do not exist in this process.
    global _waiting
    _waiting = Queue()
    _start_thread.cache_clear()


os.register_at_fork(after_in_child=_forget_parent)
