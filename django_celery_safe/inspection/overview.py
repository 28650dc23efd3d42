"""
Figures of all parts of the app, for the admin's first page and for monitoring.

Each figure is counted with an index and up to a limit, so it is fast however large the tables
are. A database or store that does not answer raises its error; callers then show "not known",
never a zero.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from django.db.models import Count, Max, Min, Q, QuerySet
from django.db.models.functions import Coalesce

from ..databases import Now, read_moment
from ..locks import iter_locks
from ..models.listing import seconds_between
from ..models.outbox import OutboxMessage
from ..models.outbox_relay import OutboxRelay
from ..models.stages import StageRun, StageStep
from ..stages import Status


class Figure(NamedTuple):
    """
    A number of rows.

    Attributes:
        number: The number of rows that were counted.
        is_cut: Whether there may be more rows.
    """

    number: int
    is_cut: bool = False

    def __str__(self) -> str:
        return f"{self.number}+" if self.is_cut else str(self.number)


class RelaySeen(NamedTuple):
    """
    The relay of an outbox that was seen last.

    Attributes:
        name: The relay's host and process.
        at: When it was seen, by the database's clock.
        ago_s: Seconds since then.
    """

    name: str
    at: datetime
    ago_s: float


class OutboxFigures(NamedTuple):
    """
    The figures of one outbox.

    Attributes:
        pending, sent, running, failed, dead: Number of messages in each state.
        oldest_s: For how long the oldest pending message waits to be sent, since it was sent last
            or its eta; None: there is none.
        checkpoint_s: Seconds since the last checkpoint of the running task whose checkpoint is the
            oldest; 0: none has one.
        lag_s: Seconds for which the longest due message has been due; 0: nothing is due.
        relay: The relay that was seen last; None: no relay was ever seen.
    """

    pending: Figure
    sent: Figure
    running: Figure
    failed: Figure
    dead: Figure
    oldest_s: float | None
    checkpoint_s: float
    lag_s: float
    relay: RelaySeen | None

    def as_json(self) -> dict[str, Any]:
        """Return the figures as ``celery_outbox status --json`` shows them."""
        counts = {
            name: value.number
            for name, value in self._asdict().items()
            if isinstance(value, Figure)
        }
        relay = self.relay
        return {
            **counts,
            "oldest_s": self.oldest_s,
            "lag_s": self.lag_s,
            "relay": relay and relay.name,
            "relay_seen_s": relay and relay.ago_s,
        }


class LockFigures(NamedTuple):
    """
    The figures of the locks that are held.

    Attributes:
        held: Number of locks by kind: ``run``, ``message`` and ``marker``.
        overdue: Number of locks that should have been renewed by now.
        is_cut: Whether there may be more locks.
    """

    held: dict[str, int]
    overdue: int
    is_cut: bool


def count(rows: QuerySet[Any], most: int) -> Figure:
    """Count at most ``most`` rows, in the queryset's order."""
    number = rows[: most + 1].count()
    return Figure(min(number, most), number > most)


def outbox_figures(alias: str, most: int) -> OutboxFigures:
    """Return the figures of the outbox in a database, each up to ``most``; four queries."""
    messages = OutboxMessage.objects.using(alias)
    pending = Q(state=OutboxMessage.State.PENDING)
    running = Q(state=OutboxMessage.State.RUNNING)
    awaits_eta = Q(sent_at__gt=Now())
    # Rows that are due soonest come first: pending messages before running and sent ones.
    live = messages.filter(due_at__isnull=False).order_by("due_at", "pk")[: most + 1]
    seen = live.aggregate(
        total=Count("pk"),
        pending=Count("pk", filter=pending),
        running=Count("pk", filter=running),
        checkpoint_at=Min("checkpoint_at", filter=running),
        oldest_at=Min(Coalesce("sent_at", "created_at"), filter=pending & ~awaits_eta),
        due_at=Min("due_at"),
        asked_at=Max(Now()),
    )
    is_cut = seen["total"] > most
    waiting = seen["total"] - seen["pending"] - seen["running"]
    return OutboxFigures(
        pending=Figure(min(seen["pending"], most), is_cut),
        sent=Figure(min(waiting, most), is_cut),
        running=Figure(min(seen["running"], most), is_cut),
        failed=count(messages.failed().order_by("-ended_at"), most),
        dead=count(messages.dead().order_by("-ended_at"), most),
        oldest_s=seconds_between(seen["oldest_at"], seen["asked_at"]),
        checkpoint_s=seconds_between(seen["checkpoint_at"], seen["asked_at"]) or 0.0,
        lag_s=seconds_between(seen["due_at"], seen["asked_at"]) or 0.0,
        relay=find_relay(alias),
    )


def find_relay(alias: str) -> RelaySeen | None:
    """Return the relay that was seen last in a database; None: no relay was ever seen."""
    relay: Any = OutboxRelay.objects.using(alias).annotate(asked_at=Now()).first()
    if relay is None:
        return None
    ago_s = seconds_between(relay.seen_at, relay.asked_at)
    return RelaySeen(str(relay), read_moment(alias, relay.seen_at), ago_s or 0.0)


def lock_figures(most: int) -> LockFigures:
    """
    Return the figures of at most ``most`` locks that are held.

    Raises:
        ConfigurationError: The store can't list its locks.
        LockBackendError: The store did not answer.
    """
    kinds: Counter[str] = Counter()
    overdue = seen = 0
    for lock in islice(iter_locks(), most + 1):
        seen += 1
        if seen <= most:
            kinds[lock.kind] += 1
            overdue += bool(lock.overdue)
    held = {kind: kinds[kind] for kind in ("run", "message", "marker")}
    return LockFigures(held, overdue, seen > most)


def count_active_runs(alias: str, most: int) -> dict[Status, Figure]:
    """Count the runs of stages that have not ended, by status; one query."""
    statuses = [Status.WAITING, Status.RUNNING]
    runs = StageRun.objects.using(alias).active().order_by("pk")[: most + 1]
    numbers = runs.aggregate(**{str(each): Count("pk", filter=Q(status=each)) for each in statuses})
    is_cut = sum(numbers.values()) > most
    return {each: Figure(min(numbers[str(each)], most), is_cut) for each in statuses}


def count_overdue_steps(alias: str, most: int) -> Figure:
    """Count the steps that were sent but not started in time; one query."""
    return count(StageStep.objects.using(alias).overdue(), most)
