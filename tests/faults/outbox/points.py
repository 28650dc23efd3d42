"""
Named points at which a process kills itself, laid around functions of the package.

The package knows nothing of them: in the process that is to die, one function is wrapped. A name
that the package has no more is an error of that process, and so of the run.
"""

import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from django.db.backends.base.base import BaseDatabaseWrapper

from django_celery_safe.models.outbox import OutboxMessages
from django_celery_safe.sending import publisher
from django_celery_safe.sending.commit import OutboxSender
from django_celery_safe.sending.outbox import MessageTable
from django_celery_safe.sending.publisher import Publisher
from tests.faults.outbox.plan import CUT_OFF, RELAY, SENDER, Witness


class Place(NamedTuple):
    """
    Where a process dies.

    Attributes:
        owner: The module or class that has the function.
        name: Of the function.
        when: Before it begins, after it has returned, or inside when bytes have left by a
            socket, and no answer has come.
        only_if: Whether the first argument (before) or the result (after) counts.
    """

    owner: Any
    name: str
    when: Literal["before", "after", "inside"]
    only_if: Callable[[Any], bool] = lambda value: True


def to_send(connection: BaseDatabaseWrapper) -> bool:
    """Return whether a commit is followed by callbacks, such as sends."""
    return bool(connection.run_on_commit)


WRITTEN: Final = Place(OutboxSender, "keep", "after")
COMMITTED: Final = Place(BaseDatabaseWrapper, "run_and_clear_commit_hooks", "before", to_send)
#: The points between INSERT and delete, by role.
PLACES: Final[Mapping[str, Mapping[str, Place]]] = {
    SENDER: {
        "before the INSERT": Place(OutboxSender, "keep", "before"),
        "after the INSERT": WRITTEN,
        "after the commit": COMMITTED,
        "inside the publication": Place(publisher, "put", "inside"),
        "after the publication": Place(Publisher, "publish", "after"),
        "after the delete": Place(OutboxSender, "send", "after"),
    },
    CUT_OFF: {"after the INSERT": WRITTEN, "after the commit": COMMITTED},
    RELAY: {
        # Where rows were claimed, or nearly; not where none was due.
        "after the claim's SELECT": Place(OutboxMessages, "_lock_fitting", "after", bool),
        "after the claim": Place(OutboxMessages, "claim", "after", bool),
        "inside the publication": Place(publisher, "put", "inside"),
        "after a publication": Place(publisher, "put", "after"),
        "before the delete": Place(MessageTable, "record_sent", "before"),
        "after the delete": Place(MessageTable, "record_sent", "after"),
        "inside the heartbeat": Place(OutboxMessages, "recall", "after"),
        # Where the transport publishes a batch in one request.
        "inside the pipeline": Place(Publisher, "publish_together", "inside"),
        "after the pipeline": Place(Publisher, "publish_together", "after"),
    },
}


def lay(role: str, point: str | None, hit: int, witness: Witness) -> None:
    """
    Let this process die at a point.

    Args:
        point: None: it dies at no point.
        hit: How often it gets there, the last included.
        witness: Is told right before.
    """
    if point is None:
        return
    owner, name, when, only_if = PLACES[role][point]
    original, left = getattr(owner, name), hit
    inside: set[int] = set()  # threads

    def reach() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            witness.record_kill(role, point, os.getpid())
            os.kill(os.getpid(), signal.SIGKILL)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when == "before" and only_if(args[0] if args else None):
            reach()
        inside.add(threading.get_ident())
        try:
            result = original(*args, **kwargs)
        finally:
            inside.discard(threading.get_ident())
        if when == "after" and only_if(result):
            reach()
        return result

    setattr(owner, name, wrapped)
    send = socket.socket.sendall

    def sendall(self: Any, *args: Any) -> None:
        send(self, *args)
        if when == "inside" and threading.get_ident() in inside:
            reach()

    socket.socket.sendall = sendall  # type: ignore[method-assign]
