"""
Publishing messages, and reporting which of them the broker has and why it lacks the others.

A commit, its outbox and a relay each have a :class:`Publisher`. They differ in the connection
that they use, in how long one wait may take, and in what happens to a message that was not
published. ``broker`` has the connections, ``deduplicate`` the locks of messages.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, TypeAlias, cast
from weakref import WeakSet

from celery import Celery, signals
from celery.backends.rpc import RPCBackend
from celery.exceptions import SoftTimeLimitExceeded
from kombu.common import maybe_declare
from kombu.serialization import loads
from kombu.transport.native_delayed_delivery import calculate_routing_key

from ..batches import in_batches
from ..concurrency.sent import seconds_until
from ..delivery.header import HEADER, read_header
from ..exceptions import find_soft_time_limit
from ..locks import HeldLock
from ..texts import describe_error, get_logger
from .broker import (
    ONE_WAIT,
    BrokerGone,
    bounded_producer,
    is_out_of_order,
    is_timeout,
    is_unreachable,
)
from .capture import Message
from .deduplicate import publish_once

logger = get_logger(__name__)

#: Messages that one request publishes.
TOGETHER: Final = 100
#: Exchange through which Celery delays messages to a quorum queue (celery/app/base.py), and the
#: prefix that it adds to the routing key: the delay in seconds, as 28 binary digits.
DELAYED: Final = "celery_delayed_27"
DELAY: Final = re.compile(r"(?:[01]\.){28}")

#: Lends a producer; raises BrokerGone if the broker can't be reached.
Lend: TypeAlias = Callable[[], AbstractContextManager[Any]]


class Publisher:
    """
    Publishes messages of one app.

    Args:
        app: The Celery app.
        lend: Lends the producer for each publication.
        wait: Longest wait for one answer from the broker, s. A message that fails is tried once
            more at once, because an idle connection may have been cut. None: the message's own
            retry policy applies.
        patient: Whether a message is tried a second time even if the broker did not answer, and
            queues of the default exchange are declared again too, with a few more requests.
        has_time: Returns whether there is time for another try.
    """

    def __init__(
        self,
        app: Celery,
        lend: Lend,
        *,
        wait: float | None = None,
        patient: bool = False,
        has_time: Callable[[], bool] = lambda: True,
    ) -> None:
        self.app = app
        self._lend = lend
        # With other backends, a caller that waits for a result subscribes to it.
        self._replies = isinstance(app.backend, RPCBackend)
        self._options: dict[str, Any] = {}
        if wait is not None:
            self._options = {"retry": False, "timeout": wait, "confirm_timeout": wait}
        self._patient, self._has_time = patient, has_time
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
        publish: Callable[[], object] = partial(self._publish, message) if now else _leave
        try:
            if takes_lock(message, begun=begun):
                return publish_once(message.options["headers"], publish, again=again)
            publish()
            return None
        except BrokerGone as gone:
            self.gone = gone
            raise

    def publish_together(
        self, messages: Iterable[Message], report: Callable[[Message], object]
    ) -> None:
        """
        Publish messages that take no lock, a hundred in one request, if the transport can.

        The caller must publish unreported messages one by one: either the transport can't
        publish several at once, or a request failed, and the broker may have some of them.

        Args:
            report: Called with each message that the broker has, in their order.

        Raises:
            BrokerGone: The broker takes no message now.
        """
        outer = sys.exc_info()[1]
        try:
            with self._lend() as producer:
                if not getattr(producer.connection.transport, "supports_batch_publish", False):
                    return
                self._redeclare(producer)
                for part in in_batches(messages, TOGETHER, lambda message: len(message.data)):
                    with producer.batch(max_size=len(part)):
                        for message in part:
                            put(message, producer, **self._options)
                    for message in part:
                        report(message)
        except BrokerGone as gone:
            self.gone = gone
            raise
        except Exception as error:
            # kombu's batch wraps every error, even a soft time limit of the running task.
            if (limit := find_soft_time_limit(error, outer)) is not None:
                raise limit from error
            if is_timeout(error) and not self._patient:
                self.gone = BrokerGone(error)
                raise self.gone from error

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
                if self._replies and message.result_wanted:
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
            gives_up = (silent and (is_last or not self._patient)) or not self._has_time()
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


def bounded_publisher(app: Celery, seconds: float, **options: Any) -> Publisher:
    """Return a publisher of outbox messages that waits at most ``seconds`` for one answer."""
    patient = options.get("patient", False)
    lend = partial(bounded_producer, app, seconds, patient=patient)
    return Publisher(app, lend, wait=seconds * ONE_WAIT, **options)


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
    if _is_delayed(given) and (left := seconds_until(message.eta)) is not None:
        key = DELAY.sub("", given["routing_key"], count=1)
        given["routing_key"] = calculate_routing_key(max(1, math.ceil(left)), key)
    producer.publish(
        message.data,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        **given,
    )


def _is_delayed(options: dict[str, Any]) -> bool:
    """Return whether the broker delays the message by its routing key, as quorum queues do."""
    exchange = getattr(options["exchange"], "name", options["exchange"])
    return exchange == DELAYED and DELAY.match(options["routing_key"] or "") is not None


def _leave() -> None:
    """Leave a message in its row."""


def _send_after_publish(message: Message) -> None:
    body = loads(
        message.data, message.content_type, message.content_encoding, accept={message.content_type}
    )
    signals.after_task_publish.send(
        sender=message.task,
        body=body,
        headers=message.options["headers"],
        exchange=message.options["exchange"],
        routing_key=message.options["routing_key"],
    )


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
