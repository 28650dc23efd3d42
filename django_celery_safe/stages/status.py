""":class:`Status`, of a run of stages and of each of its steps; and an error type of steps."""

from __future__ import annotations

from enum import nonmember
from typing import TYPE_CHECKING, Final

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

#: The error type of a step whose task its worker does not know: Celery's name for it.
NOT_REGISTERED: Final = "NotRegistered"


class Status(TextChoices):
    """
    The status of a run or of a step.

    A run waits until its first step starts. A step waits for its stage, for a worker,
    or for its next retry. The process of a running step may have died. A step fails after its
    retries; a run fails with its step, or if the params of a stage are too large together.
    ``STOPPED`` is the set of the statuses of a run that has ended.
    """

    WAITING = "waiting", _("Waiting")
    RUNNING = "running", _("Running")
    SUCCEEDED = "succeeded", _("Succeeded")
    FAILED = "failed", _("Failed")
    #: Stopped by ``abort()``; also a step that had not started when another step failed.
    ABORTED = "aborted", _("Aborted")

    if TYPE_CHECKING:
        STOPPED: frozenset[str]
    else:
        #: Statuses that only an operator can change.
        STOPPED = nonmember(frozenset(("succeeded", "failed", "aborted")))
