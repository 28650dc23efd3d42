"""
The outbox: committed messages, kept until a broker has them or until their task is done.

Beside them is the heartbeat of their relays.
"""

from __future__ import annotations

from typing import Any, ClassVar

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..databases import Now
from ..leases.holder import HeldLock, decode_holder, describe_arguments
from ..resuming.checkpoints import Cursor
from ..sending.serialization import find_headers
from ..texts import LONGEST_TYPE, duration, storable
from .columns import ExactCharField, ExactTextField, partial_index
from .listing import ListedRow
from .message_states import CARRIED, LIVE, LONGEST_DELAY, SHORTEST_DELAY, OutboxMessages, State


class OutboxMessage(ListedRow):
    """
    A message that was sent with ``outbox=True``, until a broker has it.

    A message that was sent with ``outbox="until_done"`` stays until its task has ended. The row
    is written in the transaction that sends the message;
    :mod:`django_celery_safe.sending.serialization` describes the columns. All moments are by
    the database server's clock.
    """

    State = State

    json_keys = (
        "id", "database", "state", "task", "task_id", "age_s", "due_in_s", "process", "attempts",
        "starts", "deaths", "resent", "progress", "checkpoint_at", "error_type", "error",
    )  # fmt: skip

    task = ExactCharField(_("task"), max_length=255)
    task_id = ExactCharField(_("task id"), max_length=255)
    #: The serialized arguments.
    body = models.BinaryField()
    #: Everything else of the message, as JSON.
    properties = ExactTextField()
    created_at = models.DateTimeField(_("created at"))
    state = ExactCharField(_("state"), max_length=8, choices=State.choices, default=State.PENDING)
    #: The next look of a relay at it; see ``State``. None: none.
    due_at = models.DateTimeField(_("due at"), null=True)
    #: How many times sending failed although the broker was available.
    attempts = models.PositiveSmallIntegerField(_("attempts"), default=0)
    #: The last error.
    error = ExactTextField(_("error"), default="")
    #: When it was sent last, even if it is pending again; or when it will be, because of its eta.
    sent_at = models.DateTimeField(_("sent at"), null=True)
    #: The id of this attempt of its task, from the header; "": not carried until done.
    attempt = ExactCharField(max_length=32, default="")
    #: The claim of whoever sends it or runs its task; "": nobody does.
    token = ExactCharField(max_length=32, default="")
    #: The process that runs the task, or ran it last, as JSON; see ``encode_holder``.
    holder = ExactTextField(default="")
    #: How many times the task was started, its process died, and the message was re-sent
    #: because no worker had started the task.
    starts = models.PositiveIntegerField(_("starts"), default=0)
    deaths = models.PositiveIntegerField(_("deaths"), default=0)
    resent = models.PositiveIntegerField(_("resent"), default=0)
    #: The last process that died in the task, as JSON like ``holder``.
    last_death = ExactTextField(default="")
    started_at = models.DateTimeField(_("started at"), null=True)
    #: When its task ended, or sending it was given up.
    ended_at = models.DateTimeField(_("ended at"), null=True)
    #: The argument of ``current_claim().finish()``, as JSON; "": the task did not call it. A task
    #: with a result is not run again. For a successful Django task: its return value.
    result = ExactTextField(default="")
    #: The type of the error that the task failed with, and the end of the traceback; "": none.
    error_type = ExactCharField(_("error type"), max_length=LONGEST_TYPE, default="")
    traceback = ExactTextField(_("traceback"), default="")
    #: How far its task got with ``resumable()`` or ``checkpoint()``, as JSON; "": not at all.
    cursor = ExactTextField(default="")
    #: When that was recorded last.
    checkpoint_at = models.DateTimeField(_("last checkpoint"), null=True)

    objects = OutboxMessages.as_manager()

    #: The reason why a relay that has claimed the row re-sends it; "": it is the first time.
    why_again: str = ""

    class Meta:
        verbose_name = _("outbox message")
        verbose_name_plural = _("outbox messages")
        default_permissions = ("view",)
        permissions = (
            ("retry_outboxmessage", "Can retry outbox message"),
            ("discard_outboxmessage", "Can discard outbox message"),
        )
        indexes = (
            partial_index("safe_outbox_due", LIVE, "due_at id"),
            partial_index("safe_outbox_sent", Q(state=State.SENT), "sent_at", "state sent_at"),
            models.Index(fields=["attempt"], name="safe_outbox_attempt"),
            partial_index("safe_outbox_task_id", CARRIED, "task_id"),
            # Done, failed and dead messages are listed, counted and deleted apart.
            partial_index("safe_outbox_done", Q(state=State.DONE), "ended_at", "state ended_at"),
            partial_index("safe_outbox_failed", Q(state=State.FAILED), "ended_at"),
            partial_index("safe_outbox_dead", Q(state=State.DEAD), "ended_at", "ended_at state"),
        )

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"

    @property
    def age_s(self) -> float:
        """Seconds since it was sent by the project."""
        return self.seconds_since(self.created_at) or 0.0

    @property
    def due_in_s(self) -> float | None:
        """Seconds until a relay may send it; 0: a relay already may; None: it is not due."""
        since = self.seconds_since(self.due_at)
        return None if since is None else max(0.0, -since)

    @property
    def process(self) -> str:
        """The process that runs the task, or ran it last; "": none."""
        return decode_holder(self.holder, HeldLock("")).holder.process

    @property
    def arguments(self) -> str | None:
        """The arguments as Celery shows them; None without ``SHOW_ARGUMENTS``."""
        headers = find_headers(self.properties)
        return describe_arguments(headers.get("argsrepr"), headers.get("kwargsrepr"))

    @property
    def progress(self) -> str:
        """How far its task got, such as ``1,500/20,000``; "": it does not say."""
        cursor = Cursor.read(self.cursor)
        return "" if cursor is None else cursor.progress

    @property
    def finished(self) -> bool:
        """Whether the task called ``current_claim().finish()`` and has not ended well since."""
        return bool(self.result) and self.state != State.DONE

    @property
    def reason(self) -> str:
        """Why it is in its state and what comes next, for a list; "": nothing to report."""
        facts = [self.progress]
        if self.state == State.RUNNING:
            facts.append(self.process)
        elif self.due_in_s:
            is_sent = self.state == State.SENT
            due = gettext("sent again in {time}") if is_sent else gettext("due in {time}")
            facts.append(due.format(time=duration(self.due_in_s)))
        if self.attempts:
            facts.append(gettext("{count} failed attempt(s)").format(count=self.attempts))
        if self.deaths:
            facts.append(gettext("{count} death(s)").format(count=self.deaths))
        error = ": ".join(filter(None, [self.error_type, self.error]))
        return ", ".join(filter(None, [*facts, error]))

    def fail(self, error: str, *, attempts: int) -> bool:
        """
        Record that the message could not be sent; it is due again later, or dead.

        Args:
            error: The text of the error.
            attempts: The number of attempts after which the message is dead.

        Returns:
            True if the message is dead now.
        """
        row = type(self).objects.using(self._state.db).claimed(self.token).filter(pk=self.pk)
        delay = min(SHORTEST_DELAY * 2**self.attempts, LONGEST_DELAY)
        self.attempts += 1
        is_dead = self.attempts >= attempts
        values: dict[str, Any] = {"due_at": Now() + delay}
        if is_dead:
            values = {"state": State.DEAD, "due_at": None, "ended_at": Now()}
        row.update(attempts=self.attempts, error=storable(error), token="", **values)
        return is_dead


class OutboxRelay(ListedRow):
    """The relays' heartbeat: one row that every relay updates."""

    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    seen_at = models.DateTimeField()

    objects: ClassVar[models.Manager[OutboxRelay]] = models.Manager()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"

    @property
    def ago_s(self) -> float:
        """Seconds since it was seen."""
        return max(0.0, self.seconds_since(self.seen_at) or 0.0)
