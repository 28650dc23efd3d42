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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, cast
from weakref import WeakSet

from celery import Celery, signals
from celery.backends.rpc import RPCBackend
from celery.exceptions import SoftTimeLimitExceeded
from kombu.common import maybe_declare
from kombu.serialization import loads
from kombu.transport.native_delayed_delivery import calculate_routing_key

from ..delivery.header import HEADER, read_header
from ..exceptions import find_soft_time_limit
from ..locks import HeldLock
from ..texts import describe_error, get_logger
from ..values import seconds_until
from .broker import (
    ONE_WAIT,
    BrokerGone,
    bounded_producer,
    is_out_of_order,
    is_timeout,
    is_unreachable,
    pooled_producer,
)
from .capture import Message
from .deduplicate import publish_once

logger = get_logger(__name__)

#: Exchange through which Celery delays messages to a quorum queue (celery/app/base.py), and the
#: prefix that it adds to the routing key: the delay in seconds, as 28 binary digits.
DELAYED: Final = "celery_delayed_27"
DELAY: Final = re.compile(r"(?:[01]\.){28}")


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
        has_time: Returns whether there is time for another try.
    """

    def __init__(
        self,
        app: Celery,
        seconds: float | None = None,
        *,
        patient: bool = False,
        has_time: Callable[[], bool] = lambda: True,
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
