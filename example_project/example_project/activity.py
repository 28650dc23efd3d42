"""
The activity of the site at this moment, for its start page, which asks every second.

A handful of rows of each kind, counted up to a limit, by a fixed number of queries. A list that
can't be read is None, "not known", which differs from "none".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, Final, TypeVar

from django.db import Error as DatabaseError
from django.db.models import Count, Q
from django.utils import timezone

from accounts.models import User
from albums.models import Album
from django_celery_safe import BackendNotSupported, HeldLock, LockBackendError, iter_locks
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from feeds.models import Entry, Feed

logger = logging.getLogger(__name__)

#: Rows shown of each kind.
ROWS: Final = 4
#: How far they are counted.
COUNTED: Final = 100
#: How long a run that has ended is still shown.
LATELY: Final = timedelta(minutes=1)
#: Prefix of the name of a lock that a message holds since it was sent.
SENT: Final = "sent:"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Listing:
    """The first rows of something, and how many there are, such as ``3`` or ``100+``."""

    rows: list[Any]
    count: str
    #: Whether there are more than those rows.
    is_cut: bool


@dataclass(frozen=True)
class ShownLock:
    """A lock as the page shows it."""

    name: str
    #: Whether a message holds it, and not a run.
    is_sent: bool
    lock: HeldLock
    age: str
    remaining: str


@dataclass(frozen=True)
class ShownMessage:
    """A message of the outbox as the page shows it."""

    message: OutboxMessage
    age: str


@dataclass(frozen=True)
class ShownRun:
    """A run of stages as the page shows it."""

    run: StageRun
    album: Album | None
    done: int
    total: int
    #: Since it ended; "" while it goes on.
    ended: str


def activity() -> dict[str, Any]:
    """Return what the page shows of this moment."""
    return {
        "now": timezone.now(),
        "locks": _ask(_held_locks),
        "outbox": _ask(_unsent_messages),
        "runs": _ask(_current_runs),
        "totals": _ask(_totals),
    }


def _ask(question: Callable[[], Answer]) -> Answer | None:
    try:
        return question()
    except (LockBackendError, BackendNotSupported, DatabaseError) as error:
        logger.warning("The start page shows that something is not known: %s", error)
        return None


def _held_locks() -> Listing:
    found = sorted(islice(iter_locks(), COUNTED + 1), key=lambda lock: lock.holder.since)
    return _listing(found, [_shown_lock(lock) for lock in found[:ROWS]])


def _shown_lock(lock: HeldLock) -> ShownLock:
    since = lock.holder.since
    return ShownLock(
        name=lock.name.removeprefix(SENT),
        is_sent=lock.name.startswith(SENT),
        lock=lock,
        age=_spell(time.time() - since) if since else "",
        remaining="" if lock.remaining is None else _spell(lock.remaining),
    )


def _unsent_messages() -> Listing:
    columns = ("task", "task_id", "created_at", "dead_at")
    unsent = OutboxMessage.objects.filter(sent_at__isnull=True).order_by("pk").only(*columns)
    found = list(unsent[: COUNTED + 1])
    rows = [ShownMessage(each, _since(each.created_at)) for each in found[:ROWS]]
    return _listing(found, rows)


def _current_runs() -> Listing:
    """Return the runs under way, and behind them those that ended a moment ago."""
    runs = StageRun.objects.defer("params_text")
    active = list(runs.active().order_by("-pk")[: COUNTED + 1])
    ended = runs.stopped().filter(ended_at__gte=Now() - LATELY).order_by("-ended_at")
    return _listing(active, _with_progress([*active, *ended[:ROWS]][:ROWS]))


def _with_progress(runs: list[StageRun]) -> list[ShownRun]:
    pks = [run.pk for run in runs]
    albums = {album.run_id: album for album in Album.objects.filter(run_id__in=pks)}
    succeeded = Count("pk", filter=Q(status=Status.SUCCEEDED))
    steps = StageStep.objects.filter(run__in=pks).values_list("run")
    counted = steps.annotate(done=succeeded, total=Count("pk"))
    counts: dict[int, tuple[int, int]] = {run: (done, total) for run, done, total in counted}
    return [
        ShownRun(
            run,
            albums.get(run.pk),
            *counts.get(run.pk, (0, 0)),
            "" if run.ended_at is None else _since(run.ended_at),
        )
        for run in runs
    ]


def _totals() -> dict[str, int]:
    welcomed = Count("pk", filter=Q(is_welcome_email_sent=True))
    return {
        **User.objects.aggregate(people=Count("pk"), welcomed=welcomed),
        "feeds": Feed.objects.count(),
        "entries": Entry.objects.count(),
        "albums": Album.objects.count(),
    }


def _listing(found: Sized, rows: list[Any]) -> Listing:
    count = f"{COUNTED}+" if len(found) > COUNTED else str(len(found))
    return Listing(rows, count, is_cut=len(found) > len(rows))


def _since(moment: datetime) -> str:
    return _spell((timezone.now() - moment).total_seconds())


def _spell(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
