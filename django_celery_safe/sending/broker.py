"""
Connections to broker and result backend that don't wait for ever, and what their errors mean.

Celery's own connections may block for ever if a broker accepts a connection but never answers,
and they retry for as long as the publication's retry policy allows. An outbox message is tried
once, and once more if the connection was cut; then it waits in its row.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import KombuError, LimitExceeded, OperationalError
from kombu.pools import ProducerPool

from ..texts import describe_error

if TYPE_CHECKING:
    from .capture import Message

#: Options that limit each wait, in seconds, by kind of transport (kombu's ``driver_type``).
BOUNDS: Final[dict[str, Any]] = {
    "redis": ("socket_timeout", "socket_connect_timeout"),
    "amqp": ("read_timeout", "write_timeout"),
}
#: Answers that a Redis server gives to any request while it is out of order: names of redis-py's
#: errors, and the first words of answers for which redis-py has no class.
OUT_OF_ORDER: Final = {
    "OutOfMemoryError",
    "ReadOnlyError",
    "BusyLoadingError",
    "AuthenticationError",
    "ClusterDownError",
    "MasterDownError",
}
OUT_OF_ORDER_TEXT: Final = ("MISCONF", "NOREPLICAS")
#: How many times, and with which pauses in s, kombu and Celery retry: never.
ONCE: Final = {"max_retries": 0, "interval_start": 0, "interval_step": 0, "interval_max": 0}
#: How many connections a relay keeps if ``broker_pool_limit`` is 0 or None.
RELAY_LIMIT: Final = 10
#: Fraction of the allowed time that one wait may take, to leave time for everything else.
ONE_WAIT: Final = 0.9

_pools: WeakKeyDictionary[Celery, dict[tuple[float, bool], ProducerPool]] = WeakKeyDictionary()
#: Monotonic time until which a broker that did not answer is not tried again.
_silent_until: WeakKeyDictionary[Celery, float] = WeakKeyDictionary()
#: Backends belong to threads.
_backends = threading.local()


class BrokerGone(Exception):
    """
    The broker takes no message now: it can't be reached, does not answer, or is out of order.

    Attributes:
        error: The error of the broker, or of the connection to it.
        message: The message on whose last try the broker stopped answering, and which may be
            the cause.
    """

    def __init__(self, error: Exception, message: Message | None = None) -> None:
        super().__init__(describe_error(error))
        self.error, self.message = error, message


@contextmanager
def pooled_producer(app: Celery) -> Iterator[Any]:
    """
    Lend a producer from the app's pool, as Celery does for its own sends.

    It connects when it is used, and tries for as long as Celery's settings allow.
    """
    with app.producer_or_acquire() as own, own.connection._reraise_as_library_errors():
        yield own


@contextmanager
def bounded_producer(app: Celery, seconds: float, *, patient: bool = False) -> Iterator[Any]:
    """
    Lend a pooled producer that gives up a publication after ``seconds``.

    After the broker did not answer, further calls fail at once for as long, unless they are
    ``patient``.

    Raises:
        BrokerGone: The broker can't be reached or did not answer a moment ago, or all
            connections are in use.
    """
    if not patient and time.monotonic() < _silent_until.get(app, 0.0):
        raise BrokerGone(OperationalError("the broker was silent a moment ago"))
    with _borrow(app, seconds, patient) as producer:
        try:
            # A relay records the broker's own error.
            wrapping = nullcontext if patient else producer.connection._reraise_as_library_errors
            with wrapping():
                connect(producer)
                yield producer
        except BaseException as error:
            if not patient and is_timeout(error):
                _silent_until[app] = time.monotonic() + seconds
            drop(producer.connection)
            raise


def connect(producer: Any) -> None:
    """
    Connect a producer, unless it is already connected.

    Raises:
        BrokerGone: The broker can't be reached.
    """
    try:
        producer.connection.default_channel  # noqa: B018 - connects
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        raise BrokerGone(error) from error


def _bounded_connection(app: Celery, seconds: float) -> Any:
    """Return a new, unopened connection that waits at most ``seconds`` each time."""
    connection: Any = app.connection_for_write(connect_timeout=seconds)
    options = dict(connection.transport_options)
    kind = connection.transport.driver_type
    for name in BOUNDS.get(kind, ()):
        given = options.get(name)
        options[name] = seconds if given is None else min(given, seconds)
    if kind == "amqp":
        options["confirm_publish"] = True
    if kind == "redis":
        options["retry_on_timeout"] = False
    # Try each host once.
    others = max(1, len(connection.alt)) - 1
    connection.transport_options = {**options, **ONCE, "max_retries": others}
    return connection


def drop(connection: Any) -> None:
    """Close a connection without notifying the broker; it reopens when it is used."""
    with suppress(Exception):
        connection._connection.collect()  # otherwise amqp would wait for the broker's goodbye
    with suppress(Exception):
        connection.collapse()


def _borrow(app: Celery, seconds: float, patient: bool) -> Any:
    try:
        pool = _find_pool(app, seconds, patient)
        return pool.acquire(block=True, timeout=seconds * (1 - ONE_WAIT))
    except SoftTimeLimitExceeded:
        raise
    except LimitExceeded as error:
        in_use = OperationalError(
            f"all connections of this process to the broker are in use (broker_pool_limit is "
            f"{pool.limit})"
        )
        raise BrokerGone(in_use) from error
    except Exception as error:  # such as a client that is not installed here
        raise BrokerGone(error) from error


def _find_pool(app: Celery, seconds: float, patient: bool) -> ProducerPool:
    pools = _pools.setdefault(app, {})
    if (key := (seconds, patient)) not in pools:
        # Without a limit each publication has a connection of its own: not in a relay.
        limit = app.conf.broker_pool_limit or (RELAY_LIMIT if patient else None)
        connections = _bounded_connection(app, seconds * ONE_WAIT).Pool(limit)
        pools.setdefault(key, ProducerPool(connections=connections, limit=limit))
    return pools[key]


def bounded_backend(app: Celery, seconds: float) -> Any:
    """Return this thread's result backend, which tries a request once, for ``seconds`` at most."""
    backends = _backends.__dict__.setdefault("by_app", WeakKeyDictionary()).setdefault(app, {})
    if seconds not in backends:
        backend: Any = app._get_backend()  # type: ignore[attr-defined]
        backend.retry_policy = ONCE
        parameters = getattr(backend, "connparams", None)  # Redis'
        if isinstance(parameters, dict):
            bounds = dict.fromkeys(BOUNDS["redis"], seconds * ONE_WAIT)
            backend.connparams = {**parameters, **bounds, "retry_on_timeout": False}
        backends[seconds] = backend
    return backends[seconds]


def is_unreachable(app: Celery, error: BaseException) -> bool:
    """Return whether the broker is gone or out of order, and did not just refuse this message."""
    connection: Any = app.connection_for_write()
    fault = _fault_of(error)
    if is_out_of_order(error):
        return True
    if isinstance(fault, connection.channel_errors):
        return False
    return isinstance(fault, (OperationalError, *connection.connection_errors))


def is_out_of_order(error: BaseException) -> bool:
    """Return whether the broker answered that it can take no messages now."""
    fault = _fault_of(error)
    # The error text of a pipeline starts with the command that failed.
    text = str(fault).rpartition("caused error: ")[2]
    return bool(_names_of(fault) & OUT_OF_ORDER) or text.startswith(OUT_OF_ORDER_TEXT)


def is_timeout(error: BaseException) -> bool:
    """Return whether the broker did not answer in time."""
    return "TimeoutError" in _names_of(_fault_of(error))


def _fault_of(error: BaseException) -> BaseException:
    if isinstance(error, BrokerGone):
        error = error.error
    # Kombu's own error, also the error of a batch, has the transport's error as its cause. The
    # causes of other errors, such as a lock store's error, don't concern the broker.
    return error.__cause__ or error if isinstance(error, KombuError) else error


def _names_of(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


# The sockets of a forked child's pools belong to its parent.
os.register_at_fork(after_in_child=_pools.clear)
os.register_at_fork(after_in_child=_silent_until.clear)
