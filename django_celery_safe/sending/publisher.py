"""
Publishing messages, and reporting which of them the broker has and why it lacks the others.

A commit, its outbox and a relay each have a :class:`Publisher`. They differ in the connection
that they use, in how long one wait may take, and in what happens to a message that was not
published. ``deduplicate`` has the locks of messages.

Celery's own connections may block for ever if a broker accepts a connection but never answers,
and they retry for as long as the publication's retry policy allows. An outbox message is tried
once, and once more if the connection was cut; then it waits in its row.
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Final, cast
from weakref import WeakKeyDictionary, WeakSet

from celery import Celery, signals
from celery.backends.rpc import RPCBackend
from celery.exceptions import SoftTimeLimitExceeded
from kombu.common import maybe_declare
from kombu.exceptions import KombuError, LimitExceeded, OperationalError
from kombu.pools import ProducerPool
from kombu.serialization import loads
from kombu.transport.native_delayed_delivery import calculate_routing_key

from ..delivery.header import HEADER, read_header
from ..exceptions import find_soft_time_limit
from ..locks import HeldLock
from ..texts import describe_error, get_logger
from ..values import seconds_until
from .capture import ONCE, Message
from .deduplicate import publish_once

logger = get_logger(__name__)

#: Exchange through which Celery delays messages to a quorum queue (celery/app/base.py), and the
#: prefix that it adds to the routing key: the delay in seconds, as 28 binary digits.
DELAYED: Final = "celery_delayed_27"
DELAY: Final = re.compile(r"(?:[01]\.){28}")
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
#: How many connections a relay keeps if ``broker_pool_limit`` is 0 or None.
RELAY_LIMIT: Final = 10
#: Fraction of the allowed time that one wait may take, to leave time for everything else.
ONE_WAIT: Final = 0.9

_pools: WeakKeyDictionary[Celery, dict[tuple[float, bool], ProducerPool]] = WeakKeyDictionary()
#: Monotonic time until which a broker that did not answer is not tried again.
_silent_until: WeakKeyDictionary[Celery, float] = WeakKeyDictionary()


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


class Publisher:
    """
    Publishes messages of one app.

    Args:
        app: The Celery app.
        seconds: Longest wait for one answer from the broker. A message that fails is tried once
            more at once, because an idle connection may have been cut. None: the message's own
            retry policy applies, on a connection of the app's own pool.
        patient: Whether a message is tried a second time even if the broker did not answer, and
            queues of the default exchange are declared again too, with a few more requests.
        until: Monotonic time after which nothing is tried again.
    """

    def __init__(
        self,
        app: Celery,
        seconds: float | None = None,
        *,
        patient: bool = False,
        until: float = math.inf,
    ) -> None:
        self.app = app
        #: Lends a producer; raises BrokerGone if the broker can't be reached.
        self._lend = partial(pooled_producer, app)
        # With other backends, a caller that waits for a result subscribes to it; none waits here
        # for those of a relay.
        self._replies = isinstance(app.backend, RPCBackend) and not patient
        self._options: dict[str, Any] = {}
        if seconds is not None:
            self._lend = partial(bounded_producer, app, seconds, patient=patient)
            wait = seconds * ONE_WAIT
            self._options = {"retry": False, "timeout": wait, "confirm_timeout": wait}
        self._patient, self._until = patient, until
        #: Set once the broker is gone, so that later messages don't wait for it.
        self.gone: BrokerGone | None = None
        #: Connections on which queues are declared again: a broker that restarted without
        #: its data has lost them.
        self._redeclaring: WeakSet[Any] = WeakSet()
        #: Whether an event could not be sent; no later event is tried, to wait only once.
        self._lost_event = False

    def publish(
        self, message: Message, *, again: bool = False, begun: bool = False, now: bool = True
    ) -> HeldLock | None:
        """
        Publish a message, unless the same message is already on its way.

        Args:
            again: Whether this very message may have been published before.
            begun: Whether a run of its task began: from then on, one that is unique until its
                start is no duplicate of another.
            now: Whether the broker gets it; otherwise it only takes its lock.

        Returns:
            None: the broker has it. Otherwise the lock of the message that was sent before.

        Raises:
            BrokerGone: The broker takes no message now; it may have this one.
            LockBackendError: The store of the message's lock did not answer.
            Exception: This message can't be sent, and the message itself is the cause.
        """
        if now and self.gone is not None:
            raise self.gone
        publish: Callable[[], object] = partial(self._publish, message) if now else lambda: None
        try:
            if takes_lock(message, begun=begun):
                headers = message.options["headers"]
                header = read_header(headers, message.task)
                return publish_once(headers, header, publish, again=again)
            publish()
            return None
        except BrokerGone as gone:
            self.gone = gone
            raise

    def publish_together(self, messages: Sequence[Message]) -> bool:
        """
        Publish messages that take no lock in one request, if the transport can.

        Returns:
            Whether the broker has all of them. If not, the caller must publish them one by one:
            the transport can't do it, or the request failed, and the broker may have some.

        Raises:
            BrokerGone: The broker takes no message now.
        """
        outer = sys.exc_info()[1]
        try:
            with self._lend() as producer:
                if not getattr(producer.connection.transport, "supports_batch_publish", False):
                    return False
                self._redeclare(producer)
                with producer.batch(max_size=len(messages)):
                    for message in messages:
                        put(message, producer, **self._options)
                return True
        except BrokerGone as gone:
            self.gone = gone
            raise
        except Exception as error:
            # kombu's batch wraps every error, even a soft time limit of the running task.
            if (limit := find_soft_time_limit(error, outer)) is not None:
                raise limit from error
            return False

    def announce(self, message: Message) -> None:
        """
        Emit the signal and the event that Celery's own sender emits after a publication.

        A failure is only logged as a warning, because the broker has the message.
        """
        try:
            if signals.after_task_publish.receivers:
                message.context.run(_send_after_publish, message)
            if message.event is None or self.gone is not None or self._lost_event:
                return
            self._lost_event = True
            with self._lend() as producer:
                _publish_event(message, message.event, producer, self._options)
            self._lost_event = False
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the message is out
            text = "Task %s[%s] was published, but its receivers could not be notified: %s"
            logger.warning(text, message.task, message.task_id, describe_error(error))

    def _publish(self, message: Message, *, is_last: bool = False) -> None:
        try:
            with self._lend() as producer:
                if self._replies and not message.options["headers"].get("ignore_result"):
                    # The broker delivers results only to a queue that exists.
                    backend: Any = self.app.backend
                    maybe_declare(backend.binding(producer.channel))
                if self._options and (self._patient or message.options["exchange"]):
                    self._redeclare(producer)
                put(message, producer, **self._options)
            return
        except (BrokerGone, SoftTimeLimitExceeded):
            raise
        except Exception as error:
            if not is_unreachable(self.app, error):
                raise
            silent = is_timeout(error)
            is_late = time.monotonic() >= self._until
            gives_up = is_late or (silent and (is_last or not self._patient))
            if gives_up or not self._options or is_out_of_order(error):
                raise BrokerGone(error, message if silent and is_last else None) from error
            if is_last:
                with self._lend():
                    # The broker can be connected before this message and after it, so the
                    # message is at fault.
                    raise
        self._publish(message, is_last=True)

    def _redeclare(self, producer: Any) -> None:
        if producer.connection not in self._redeclaring:
            self._redeclaring.add(producer.connection)
            producer.connection.declared_entities.clear()


def takes_lock(message: Message, *, begun: bool = False) -> bool:
    """
    Return whether only the publication of a message shows if it is a duplicate.

    Args:
        begun: As for :meth:`Publisher.publish`.
    """
    headers = message.options["headers"]
    ours = headers.get(HEADER)
    if not isinstance(ours, dict) or "sent" not in ours:  # most have no such field, valid or not
        return False
    header = read_header(headers, headers.get("task"))
    return "sent" in header and not (begun and "start" in header)


def put(message: Message, producer: Any, **options: Any) -> None:
    """
    Hand a message to a producer; nothing is emitted.

    Args:
        options: Options of ``Producer.publish``, which take precedence over the message's own.
    """
    given = {**message.options, **options}
    # The message has waited, so its relative time to live and delay are computed again.
    if given.get("expiration") is not None:
        left = seconds_until(message.expires)
        given["expiration"] = given["expiration"] if left is None else max(0.0, left)
    # A quorum queue's broker delays a message by its routing key.
    exchange = getattr(given["exchange"], "name", given["exchange"])
    is_delayed = exchange == DELAYED and DELAY.match(given["routing_key"] or "")
    if is_delayed and (left := seconds_until(message.eta)) is not None:
        key = DELAY.sub("", given["routing_key"], count=1)
        given["routing_key"] = calculate_routing_key(max(1, math.ceil(left)), key)
    content = {"content_type": message.content_type, "content_encoding": message.content_encoding}
    producer.publish(message.data, **content, **given)


def _send_after_publish(message: Message) -> None:
    content_type = message.content_type
    body = loads(message.data, content_type, message.content_encoding, accept={content_type})
    facts = {name: message.options[name] for name in ("headers", "exchange", "routing_key")}
    signals.after_task_publish.send(sender=message.task, body=body, **facts)


def _publish_event(
    message: Message, event: dict[str, Any], producer: Any, above: dict[str, Any]
) -> None:
    options = {**message.options, **above}
    exchange, events = options["exchange"], cast("Any", message.app.events)
    place = {"exchange": getattr(exchange, "name", exchange), "routing_key": options["routing_key"]}
    retrying = {name: options[name] for name in ("retry", "retry_policy")}
    # It raises errors, unlike Celery's own.
    dispatcher = events.Dispatcher(enabled=False, buffer_while_offline=False)
    dispatcher.publish("task-sent", {**event, **place}, producer, **retrying)


# The sockets of a forked child's pools belong to its parent.
os.register_at_fork(after_in_child=_pools.clear)
os.register_at_fork(after_in_child=_silent_until.clear)
