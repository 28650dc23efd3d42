""":class:`Status`, of a run of stages and of each of its steps."""

from __future__ import annotations

from enum import nonmember
from typing import TYPE_CHECKING

from django.db.models import TextChoices


class Status(TextChoices):
    """
    Where a run, or a step, stands.

    A run waits until its first step begins. A step waits for its stage, for a worker,
    or for its next retry.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    #: Stopped by ``abort()``; of a step also: not begun when another failed.
    ABORTED = "aborted"

    if TYPE_CHECKING:
        STOPPED: frozenset[str]
    else:
        #: Those in which nothing more happens by itself.
        STOPPED = nonmember(frozenset(("succeeded", "failed", "aborted")))
