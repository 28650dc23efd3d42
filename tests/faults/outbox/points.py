"""
Named points at which a process kills itself, laid around functions of the package.

The package knows nothing of them: in the process that is to die its functions are wrapped.
"""

import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper

from django_celery_safe.models import OutboxMessages, message_states
from django_celery_safe.sending import commit, departure, publisher
from django_celery_safe.sending.publisher import Publisher
from tests.faults.outbox.plan import Witness

#: The publication that goes on in this thread, as the name of its point.
_publishing = threading.local()


class Fuse:
    """
    Kills the process when it comes to a point.

    Args:
        point: Its name; None: it is never killed.
        hit: How often it gets there, the last included.
    """

    def __init__(self, witness: Witness, role: str, point: str | None, hit: int) -> None:
        self._witness, self._role, self._point, self._left = witness, role, point, hit

    def reach(self, *points: str) -> None:
        """Come to points of these names."""
        if self._point not in points:
            return
        self._left -= 1
        if self._left == 0:
            self._witness.record_kill(self._role, self._point or "", os.getpid())
            os.kill(os.getpid(), signal.SIGKILL)


def lay_in_sender(fuse: Fuse) -> None:
    """Lay the points of a process that sends, with an outbox or without."""
    _wrap(commit, "keep", fuse, before="before the INSERT", after="after the INSERT")
    _wrap(commit, "_publish_held", fuse, before="after the commit")
    _wrap(commit, "_publish", fuse, after="after the publication")
    _wrap(departure.OutboxBatch, "end", fuse, after="after the delete")
    _wrap_publication(publisher, "put", "inside the publication")
    _watch_socket(fuse)


def lay_in_relay(fuse: Fuse) -> None:
    """Lay the points of a process that relays."""
    _lay_in_claim(fuse)
    _wrap(publisher, "put", fuse, after="after a publication")
    _wrap(Publisher, "publish_together", fuse, after="after the pipeline")
    _wrap(OutboxMessages, "record_sent", fuse, before="before the delete", after="after the delete")
    _wrap(OutboxMessages, "recall", fuse, after="inside the heartbeat")
    _wrap_publication(publisher, "put", "inside the publication")
    _wrap_publication(Publisher, "publish_together", "inside the pipeline")
    _watch_socket(fuse)


def _lay_in_claim(fuse: Fuse) -> None:
    """Lay points where rows were claimed, or nearly; not where none was due."""
    change, commit_now = message_states.change_returning, BaseDatabaseWrapper._commit

    @functools.wraps(change)
    def change_and_die(*args: Any) -> Any:
        if _is_claiming(sys._getframe(1)):
            fuse.reach("after the claim's SELECT")
        return change(*args)

    @functools.wraps(commit_now)
    def die_and_commit(self: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if _is_claiming(frame):
                fuse.reach("after the claim's UPDATE")
            frame = frame.f_back
        return commit_now(self)

    message_states.change_returning = change_and_die
    BaseDatabaseWrapper._commit = die_and_commit
    _wrap(OutboxMessages, "claim", fuse, after="after the claim", only_if=bool)


def _is_claiming(frame: FrameType) -> bool:
    is_claim = frame.f_code.co_name in ("claim", "_claim")
    return is_claim and bool(frame.f_locals.get("rows"))


def _wrap(
    owner: Any,
    name: str,
    fuse: Fuse,
    *,
    before: str | None = None,
    after: str | None = None,
    only_if: Callable[[Any], bool] = lambda result: True,
) -> None:
    """Let a function reach points before it begins and when it has returned."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            fuse.reach(before)
        result = original(*args, **kwargs)
        if after is not None and only_if(result):
            fuse.reach(after)
        return result

    setattr(owner, name, wrapped)


def _wrap_publication(owner: Any, name: str, point: str) -> None:
    """Let what a function sends through a socket count as this point."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _counting_as(point):
            return original(*args, **kwargs)

    setattr(owner, name, wrapped)


@contextmanager
def _counting_as(point: str) -> Iterator[None]:
    outer = getattr(_publishing, "point", None)
    # Messages in a pipeline leave with it.
    _publishing.point = outer or point
    try:
        yield
    finally:
        _publishing.point = outer


def _watch_socket(fuse: Fuse) -> None:
    """Reach a publication's point when bytes have left, and no answer has come."""
    original = socket.socket.sendall

    def sendall(self: Any, *args: Any) -> None:
        original(self, *args)
        point = getattr(_publishing, "point", None)
        if point is not None:
            fuse.reach(point)

    socket.socket.sendall = sendall  # type: ignore[method-assign,assignment]
