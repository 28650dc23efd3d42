"""
Events: an event is a log record and a signal that are filled from the same fields.

:mod:`django_celery_safe.events` declares them all.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import Queue
from typing import Any, Final, Self

from django.db import connections, transaction
from django.dispatch import Signal

from .foreign_errors import describe_error, find_interruption
from .texts import get_logger

#: How a record shows a field that is empty or None.
_IF_EMPTY: Final = {
    "holder": "nobody known",
    "task_id": "(called directly)",
    "error": "a step failed",
    "name": "unnamed",
}


class LoggedEvent:
    """
    An event that is logged.

    The logger ``django_celery_safe.<name>`` writes its record, which carries each field in
    ``extra`` as ``safe_<field>``.

    Args:
        name: The name of the event, and of its signal if it has one.
        level: The level of the log record.
        text: The text of the log record, with ``%(field)s`` for fields.
        more: The names of the fields that the text does not show, separated by spaces.

    Attributes:
        fields: The names of all fields of the event.
    """

    _signal: Signal | None = None

    def __init__(self, name: str, level: int, text: str, *, more: str = "") -> None:
        self.name, self.level, self.text = name, level, text
        shown = re.findall(r"%\((\w+)\)", text)
        self.fields: Final = tuple(dict.fromkeys([*shown, *more.split()]))
        self.logger: Final = get_logger(f"django_celery_safe.{name}")

    def also(self, text: str = "", *, level: int | None = None) -> Self:
        """Return the same event with another text, another level, or both."""
        other = copy.copy(self)
        other.text = text or self.text
        other.level = self.level if level is None else level
        return other

    def is_observed(self) -> bool:
        """Return whether it has receivers or is logged; if not, a hot path can skip its fields."""
        has_receivers = self._signal is not None and bool(self._signal.receivers)
        return has_receivers or self.logger.isEnabledFor(self.level)

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
        log = None
        if self.logger.isEnabledFor(self.level):
            log = partial(
                self.logger.log,
                self.level,
                self.text,
                {name: _show(name, value) for name, value in fields.items()},
                extra={f"safe_{name}": value for name, value in fields.items()},
                exc_info=exc_info,
                stacklevel=3,  # the record shows the place where the event was emitted
            )
        _send_all(log, self._signal, sender, fields)

    def emit_on_commit(self, sender: Any, /, *, using: str, **fields: Any) -> None:
        """Emit the event when the database's open transaction commits; not after a rollback."""
        if self.is_observed():
            transaction.on_commit(partial(self.emit, sender, **fields), using=using)


class Event(LoggedEvent):
    """
    An event that is logged and sent as a signal.

    Attributes:
        signal: The signal, sent with the event's fields.
    """

    def __init__(self, name: str, level: int, text: str, *, more: str = "") -> None:
        super().__init__(name, level, text, more=more)
        self.signal: Final = Signal()
        self._signal = self.signal


def _show(name: str, value: Any) -> Any:
    if isinstance(value, BaseException):
        return describe_error(value)
    return _IF_EMPTY.get(name, value) if value is None or value == "" else value


class _Sending(threading.local):
    """The signals whose receivers this thread runs now."""

    def __init__(self) -> None:
        self.signals: set[Signal] = set()


_sending = _Sending()
_background: Queue[Any] | None = None
_background_begins = threading.Lock()
#: Longest time that a process waits for receivers when it exits, s.
EXIT_FLUSH_TIMEOUT: Final = 2.0


def _send_all(
    log: Callable[[], object] | None, signal: Signal | None, sender: Any, fields: dict[str, Any]
) -> None:
    """
    Write a record and send a signal; errors of handlers and receivers do not propagate.

    Args:
        log: Writes the record; None: its level is disabled.

    Raises:
        SoftTimeLimitExceeded: The task's limit was reached inside a receiver or handler.
    """
    errors: list[Exception] = []
    if log is not None:
        try:
            log()
        except Exception as error:  # noqa: BLE001 - a handler may raise anything
            _print(error)
            errors.append(error)
    if signal is not None and signal.receivers and signal not in _sending.signals:
        _sending.signals.add(signal)
        try:
            outcomes = signal.send_robust(sender=sender, **fields)
            errors += [outcome for _, outcome in outcomes if isinstance(outcome, Exception)]
        except Exception as error:  # noqa: BLE001
            # Django's own logging failed: it wants a receiver's name, and a partial has none.
            _print(error)
            errors.append(error)
        finally:
            _sending.signals.discard(signal)
    for failure in errors:
        if (limit := find_interruption(failure, sys.exc_info()[1])) is not None:
            raise limit


def emit_in_background(emit: Callable[..., object], *args: Any) -> None:
    """
    Emit an event for a thread that must not be delayed.

    Receivers may be slow, so they run in a separate thread, one event after the other. An
    exiting process waits for them at most ``EXIT_FLUSH_TIMEOUT`` s.
    """
    global _background
    with _background_begins:
        events = _background
        if events is None:
            events = Queue()
            with suppress(RuntimeError):  # Python is shutting down and can't start a thread
                threading.Thread(
                    target=_emit_queued,
                    args=(events,),
                    name="django_celery_safe events",
                    daemon=True,
                ).start()
                _background = events
        has_thread = _background is not None
    if has_thread:
        events.put((emit, args))
    else:
        emit(*args)


def _emit_queued(events: Queue[Any]) -> None:
    while True:
        emit, args = events.get()
        with suppress(BaseException):
            emit(*args)
        del emit, args  # a reference would keep the renewal of a lease running
        # This thread's connections may be dead by the next event. A connection that can't be
        # closed must not end the thread, because all later events need it.
        with suppress(Exception):
            connections.close_all()
        events.task_done()


@atexit.register
def _flush_background() -> None:
    ends_at = time.monotonic() + EXIT_FLUSH_TIMEOUT
    while _background is not None and _background.unfinished_tasks and time.monotonic() < ends_at:
        time.sleep(0.01)


def _print(error: Exception) -> None:
    # Not with a logger, because logging has just failed.
    if logging.raiseExceptions:
        with suppress(Exception):
            traceback.print_exception(error)


def _forget_parent() -> None:
    # The parent's threads do not exist in this process.
    global _background, _background_begins
    _background, _background_begins = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_parent)
