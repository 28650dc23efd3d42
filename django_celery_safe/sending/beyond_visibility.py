"""Warning about messages that the broker redelivers before they are due."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..concurrency.sent import seconds_until
from ..delivery.copies import visibility_timeout
from ..events import SENT_BEYOND_VISIBILITY
from ..usage import calling_line

#: Transports that redeliver a message if it is not acknowledged within the visibility timeout.
#: A worker does not acknowledge a message before its ETA.
REDELIVERING: Final = ("redis", "sqs")


def redelivers(app: Any) -> bool:
    """Return whether the app's broker redelivers messages after a visibility timeout."""
    try:
        return app.connection_for_write().transport.driver_type in REDELIVERING
    except Exception:  # noqa: BLE001 - a broker that can't be used says so itself
        return False


def warn_if_beyond_visibility(app: Any, task: str, options: Mapping[str, Any]) -> None:
    """Log a send that is due after the visibility timeout, with its place in the code."""
    delay = options.get("countdown") or options.get("eta")  # as Celery does
    seconds = None if delay is None else seconds_until(delay)
    if seconds is None or app.conf.task_always_eager:
        return
    try:
        timeout = visibility_timeout(app)
    except (TypeError, ValueError):
        return  # the broker's transport says so
    if seconds <= timeout or not redelivers(app):
        return
    place = calling_line()
    SENT_BEYOND_VISIBILITY.emit(
        warn_if_beyond_visibility, task=task, delay=seconds, visibility_timeout=timeout, place=place
    )
