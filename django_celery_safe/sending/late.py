"""Telling of messages that their broker delivers again before they are due."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from ..concurrency.copies import visibility_timeout
from ..concurrency.sent import seconds_until
from ..signals import emit, sent_beyond_visibility
from ..texts import get_logger
from .early import find_place

logger = get_logger(__name__)

#: Transports that deliver a message again when it was not acknowledged for some time, and a
#: worker acknowledges none before its ETA.
REDELIVERING: Final = ("redis", "sqs")


def redelivers(app: Any) -> bool:
    """Tell whether the app's broker delivers again what was not acknowledged for some time."""
    try:
        return app.connection_for_write().transport.driver_type in REDELIVERING
    except Exception:  # noqa: BLE001 - a broker that can't be used says so itself
        return False


def tell_if_beyond_visibility(app: Any, task: str, options: Mapping[str, Any]) -> None:
    """Log, with its place in the code, a send that is due later than its broker is patient."""
    delay = options.get("countdown") or options.get("eta")  # as Celery does
    seconds = None if delay is None else seconds_until(delay)
    if seconds is None:
        return
    try:
        timeout = visibility_timeout(app)
    except (TypeError, ValueError):
        return  # the broker's transport says so
    if seconds <= timeout or not redelivers(app):
        return
    place = find_place()
    emit(
        sent_beyond_visibility,
        logger,
        logging.WARNING,
        "Task %s is sent by %s to run in %.0f s, but after a visibility_timeout of %.0f s the "
        "broker delivers it again, to every worker that waits: it runs several times. Raise "
        "visibility_timeout in broker_transport_options above that, or use RabbitMQ with a "
        "consumer_timeout above that.",
        task,
        place,
        seconds,
        timeout,
        sender=tell_if_beyond_visibility,
        task=task,
        delay=seconds,
        visibility_timeout=timeout,
        place=place,
    )
