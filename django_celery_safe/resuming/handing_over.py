"""
Handing over: a task whose worker shuts down ends at its next checkpoint, and another goes on.

A signal reaches only the main process of a worker. It tells its children by a byte of memory that
they share since it forked them: no statement, and nothing that could be late or get lost. Where a
pool does not fork, the task is not told, and ends as it would without this.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from celery import signals

from ..delivery.copies import WillBeRedelivered
from ..leases.claim import own_claims
from ..texts import get_logger

logger = get_logger(__name__)

#: Not 0 once the worker shuts down. A worker has one that its children share.
_shared: Any = bytearray(1)


class HandedOver(WillBeRedelivered):
    """Ends a run whose worker shuts down; a relay sends its message to another worker."""


def connect() -> None:
    """Hear of the begin and the end of this process's worker."""
    signals.worker_init.connect(_on_init, dispatch_uid=__name__)
    signals.worker_shutting_down.connect(_on_shutting_down, dispatch_uid=__name__)
    signals.worker_shutdown.connect(_on_shutting_down, dispatch_uid=__name__)


def _on_init(sender: Any, **kwargs: Any) -> None:
    import mmap  # a process that is no worker needs none

    global _shared
    _shared = mmap.mmap(-1, 1)
    # A soft shutdown, and one by remote control, send no signal before they wait for tasks.
    for name in ("wait_for_soft_shutdown", "stop"):
        setattr(sender, name, partial(_tell_and, getattr(sender, name)))


def _tell_and(wait: Any, *args: Any, **kwargs: Any) -> Any:
    _on_shutting_down()
    return wait(*args, **kwargs)


def _on_shutting_down(signal: Any = None, **kwargs: Any) -> None:
    # When it is over, this process goes on without a worker, as one of a test does.
    _shared[0] = signal is not signals.worker_shutdown


def hand_over_if_told() -> None:
    """
    End the run at a checkpoint if its worker shuts down and a row runs it again.

    Raises:
        HandedOver: The run ends; if the task catches this, the run still does not count as done.
    """
    for one in own_claims():
        if _shared[0] and one.is_carried:
            one.handed_over = HandedOver("Its worker shuts down, and another one goes on")
            logger.info("%s is handed over: its worker shuts down.", one.key)
            raise one.handed_over
