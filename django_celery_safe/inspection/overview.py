"""
Figures of all parts of the app, for the admin's first page and for monitoring.

Each figure is counted with an index and up to ``MOST``, so it is fast however large the tables
are. A database or store that does not answer raises its error; callers then show "not known",
never a zero.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, Final, NamedTuple

from django.db.models import Count, Max, Min, Q, QuerySet
from django.db.models.functions import Coalesce
from django.utils.formats import number_format

from ..databases import Now
from ..locks import iter_locks
from ..models.listing import seconds_between
from ..models.outbox import OutboxMessage, OutboxRelay

#: Up to how many rows or locks are counted: "10,000+" tells an operator enough.
MOST: Final = 10_000


class OutboxFigures(NamedTuple):
    """
    The figures of one outbox.

    Attributes:
        counts: Number of messages in each state but "done": pending, sent, running, failed, dead.
        oldest_s: For how long the oldest pending message waits to be sent, since it was sent last
            or its eta; None: there is none.
        checkpoint_s: Seconds since the last checkpoint of the running task whose checkpoint is the
            oldest; 0: none has one.
        lag_s: Seconds for which the longest due message has been due; 0: nothing is due.
        relay: The relay that was seen last; None: no relay was ever seen.
    """

    counts: dict[str, int]
    oldest_s: float | None
    checkpoint_s: float
    lag_s: float
    relay: OutboxRelay | None

    def as_json(self) -> dict[str, Any]:
        """Return the figures as ``celery_outbox status --json`` shows them."""
        relay = self.relay
        return {
            **self.counts,
            "oldest_s": self.oldest_s,
            "lag_s": self.lag_s,
            "relay": relay and str(relay),
            "relay_seen_s": relay and relay.ago_s,
        }


def shown(number: int) -> str:
    """Return a figure for people; "+": there may be more."""
    return number_format(number, force_grouping=True) + "+" * (number >= MOST)


def count(rows: QuerySet[Any]) -> int:
    """Count at most ``MOST`` rows, in the queryset's order."""
    return rows[:MOST].count()


def outbox_figures(alias: str) -> OutboxFigures:
    """Return the figures of the outbox in a database; four queries."""
    messages, state = OutboxMessage.objects.using(alias), OutboxMessage.State
    pending, running = Q(state=state.PENDING), Q(state=state.RUNNING)
    awaits_eta = Q(sent_at__gt=Now())
    # Rows that are due soonest come first: pending messages before running and sent ones.
    live = messages.filter(due_at__isnull=False).order_by("due_at", "pk")[:MOST]
    seen = live.aggregate(
        pending=Count("pk", filter=pending),
        sent=Count("pk", filter=Q(state=state.SENT)),
        running=Count("pk", filter=running),
        checkpoint_at=Min("checkpoint_at", filter=running),
        oldest_at=Min(Coalesce("sent_at", "created_at"), filter=pending & ~awaits_eta),
        due_at=Min("due_at"),
        asked_at=Max(Now()),
    )
    counts = {name: seen[name] for name in ("pending", "sent", "running")}
    counts["failed"] = count(messages.failed().order_by("-ended_at"))
    counts["dead"] = count(messages.dead().order_by("-ended_at"))
    return OutboxFigures(
        counts,
        oldest_s=seconds_between(seen["oldest_at"], seen["asked_at"]),
        checkpoint_s=seconds_between(seen["checkpoint_at"], seen["asked_at"]) or 0.0,
        lag_s=seconds_between(seen["due_at"], seen["asked_at"]) or 0.0,
        relay=find_relay(alias),
    )


def find_relay(alias: str) -> OutboxRelay | None:
    """Return the relay that was seen last in a database; None: no relay was ever seen."""
    relay: OutboxRelay | None = OutboxRelay.objects.using(alias).annotate(asked_at=Now()).first()
    return relay


def lock_figures() -> tuple[dict[str, int], int]:
    """
    Return how many locks are held, by kind, and how many of them should have been renewed by now.
    """
    locks = [(lock.kind, bool(lock.overdue)) for lock in islice(iter_locks(), MOST)]
    kinds = [kind for kind, _ in locks]
    held = {kind: kinds.count(kind) for kind in ("run", "message", "marker")}
    return held, sum(overdue for _, overdue in locks)
