"""
Metrics for Prometheus: figures of the tables, and counters of events.

It needs the extra ``prometheus``. :class:`TableCollector` queries the databases and the store of
the locks at each scrape, so only one process needs to export it. :func:`count_events` counts the
events of its own process, so every process calls it. docs/reference/metrics.md lists the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar
from weakref import WeakSet

from django.db import connections
from django.dispatch import Signal
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .. import signals
from ..exceptions import BackendNotSupported
from ..foreign_errors import describe_error
from ..inspection import overview
from ..locks.stores import locks_are_shared
from ..sending.outbox import outbox_aliases
from ..stages.step_table import step_table
from ..texts import get_logger

logger = get_logger(__name__)

Answer = TypeVar("Answer")

#: The prefix of every metric's name.
PREFIX: Final = "celery_safe_"
#: Limit up to which rows and locks are counted, so that scrapes stay fast with a huge backlog.
MOST: Final = 100_000


class Counted(NamedTuple):
    """
    An event that is counted.

    Attributes:
        name: The metric's name, without the prefix and ``_total``.
        signal: The event's signal.
        text: The description of the metric.
        labels: The event's fields that are labels, each with few values.
    """

    name: str
    signal: Signal
    text: str
    labels: tuple[str, ...] = ()


COUNTED: Final = (
    Counted(
        "messages_sent", signals.task_sent,
        "Messages that waited for a commit and were published, by their sender or a relay.",
        ("task", "relayed"),
    ),
    Counted(
        "send_failures", signals.task_send_failed,
        "Attempts to publish a message that failed; without the outbox the message is lost.",
        ("task", "kept"),
    ),
    Counted("messages_done", signals.message_done, "Carried tasks that ended well.", ("task",)),
    Counted(
        "messages_failed", signals.message_failed, "Carried tasks that ended in an error.",
        ("task",),
    ),
    Counted(
        "messages_dead", signals.message_dead,
        "Messages that could not be sent, and that no relay tries again.",
        ("task",),
    ),
    Counted(
        "messages_brought_back", signals.message_brought_back,
        "Messages of carried tasks that a relay sent again.",
        ("task",),
    ),
    Counted(
        "messages_lost", signals.message_lost,
        "Carried tasks whose lease ended while their process ran them.",
    ),
    Counted(
        "tasks_poisoned", signals.task_poisoned,
        "Tasks that are not run again, because too many processes died in them.",
        ("task",),
    ),
    Counted(
        "duplicates", signals.task_duplicate,
        "Sends of a task that was sent before and had not started or ended.",
        ("task",),
    ),
    Counted(
        "conflicts", signals.task_conflict, "Runs that met another run which holds their lock.",
        ("on_conflict",),
    ),
    Counted("locks_lost", signals.lock_lost, "Locks that ended while their holder worked."),
    Counted(
        "lock_store_failures", signals.lock_backend_failed,
        "Releases and renewals to which the store of the locks did not answer.",
    ),
    Counted("claims_finished", signals.claim_finished, "Work under a key that was done."),
    Counted("claims_repeated", signals.claim_repeated, "Work under a key that was done before."),
    Counted("claims_failed", signals.claim_failed, "Work under a key that failed."),
    Counted(
        "claims_lost", signals.claim_lost,
        "Claims of work under a key that ended while their holder worked.",
    ),
    Counted("runs_started", signals.run_started, "Runs of stages that were started."),
    Counted("runs_ended", signals.run_ended, "Runs of stages that ended.", ("status",)),
    Counted("runs_repaired", signals.run_repaired, "Repairs of runs of stages by a sweep."),
    Counted("steps_succeeded", signals.step_succeeded, "Steps that succeeded.", ("task",)),
    Counted("steps_failed", signals.step_failed, "Steps that failed.", ("task",)),
    Counted(
        "steps_lost", signals.step_lost, "Steps whose lease ended while their process ran them."
    ),
)  # fmt: skip

#: The gauges, with the help text and the labels of each.
GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "up": (
        "Whether the source of figures answered; if it did not, its figures are missing.",
        ("source", "database"),
    ),
    "outbox_messages": ("Messages in the outbox, by their state.", ("database", "state")),
    "outbox_oldest_pending_seconds": (
        "Age of the oldest message that is still to be sent.",
        ("database",),
    ),
    "outbox_lag_seconds": (
        "Time since a relay could have taken the message that is due the longest.",
        ("database",),
    ),
    "relay_last_seen_timestamp_seconds": (
        "When a relay was seen last; missing if none ever was.",
        ("database",),
    ),
    "locks_held": ("Locks that are held, by what holds them.", ("kind",)),
    "locks_overdue": ("Locks that their holder should have renewed by now.", ()),
    "stage_runs": ("Runs of stages that have not ended, by their status.", ("database", "status")),
    "stage_steps_overdue": (
        "Steps that were sent and that no worker began in time.",
        ("database",),
    ),
}
#: The states of messages that are exported; "done" is left out.
STATES: Final = ("pending", "sent", "running", "failed", "dead")

_counting: WeakSet[CollectorRegistry] = WeakSet()


def count_events(registry: CollectorRegistry = REGISTRY) -> None:
    """
    Count this process's events from now on; a second call for a registry does nothing.

    Call it in ``ready()`` of an app of the project, so that web processes, workers and relays
    all count. A worker's children count separately: combine their values with the multiprocess
    mode of prometheus_client.

    Args:
        registry: The registry of the counters.
    """
    if registry in _counting:
        return
    _counting.add(registry)
    for counted in COUNTED:
        counter = Counter(PREFIX + counted.name, counted.text, counted.labels, registry=registry)
        counted.signal.connect(_counting_with(counter, counted.labels), weak=False)


def _counting_with(counter: Counter, labels: tuple[str, ...]) -> Callable[..., None]:
    def receive(**fields: Any) -> None:
        values = [_label(fields[name]) for name in labels]
        (counter.labels(*values) if labels else counter).inc()

    return receive


def _label(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class TableCollector(Collector):
    """
    The figures of tables and locks, queried at each scrape.

    If a source does not answer, its ``celery_safe_up`` is 0 and its other figures are left out.
    A store that can't list its locks, or that processes don't share, is not a source.

    Args:
        most: The maximum number of rows or locks of each kind that are counted.

    Example:
        REGISTRY.register(TableCollector())
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so registering the collector queries no database."""
        return list(_make_families().values())

    def collect(self) -> Iterable[Metric]:
        """Query every source, and return the figures."""
        scrape = _Scrape(self._most)
        with _leaving_no_connection():
            scrape.ask_all()
        return list(scrape.families.values())


class _Scrape:
    """The figures of one scrape."""

    def __init__(self, most: int) -> None:
        self.families, self._most = _make_families(), most

    def ask_all(self) -> None:
        """Query every source, even if another source fails."""
        for alias in self._ask("outbox", "", outbox_aliases) or ():
            self._ask("outbox", alias, partial(self._add_outbox, alias))
        if table := self._ask("stages", "", step_table):
            self._ask("stages", table.alias, partial(self._add_stages, table.alias))
        if self._ask("locks", "", locks_are_shared):
            self._ask("locks", "", self._add_locks)

    def _ask(self, source: str, database: str, question: Callable[[], Answer]) -> Answer | None:
        """Return the answer; None: there is no such source, or an error, which is recorded."""
        try:
            return question()
        except BackendNotSupported:
            return None
        except Exception as error:  # noqa: BLE001 - a scrape reports whatever keeps it from asking
            logger.warning("The metrics of %s can't be asked: %s", source, describe_error(error))
            self._add("up", 0, source, database)
            return None

    def _add(self, name: str, value: float, *labels: str) -> None:
        self.families[name].add_metric(labels, value)

    def _add_outbox(self, alias: str) -> None:
        figures = overview.outbox_figures(alias, self._most)
        for state in STATES:
            self._add("outbox_messages", getattr(figures, state).number, alias, state)
        self._add("outbox_oldest_pending_seconds", figures.oldest_s or 0.0, alias)
        self._add("outbox_lag_seconds", figures.lag_s, alias)
        if figures.relay is not None:
            seen = figures.relay.at.timestamp()
            self._add("relay_last_seen_timestamp_seconds", seen, alias)
        self._add("up", 1, "outbox", alias)

    def _add_stages(self, alias: str) -> None:
        active = overview.count_active_runs(alias, self._most)
        overdue = overview.count_overdue_steps(alias, self._most)
        for status, figure in active.items():
            self._add("stage_runs", figure.number, alias, str(status))
        self._add("stage_steps_overdue", overdue.number, alias)
        self._add("up", 1, "stages", alias)

    def _add_locks(self) -> None:
        figures = overview.lock_figures(self._most)
        for kind, number in figures.held.items():
            self._add("locks_held", number, kind)
        self._add("locks_overdue", figures.overdue)
        self._add("up", 1, "locks", "")


def _make_families() -> dict[str, GaugeMetricFamily]:
    return {
        name: GaugeMetricFamily(PREFIX + name, text, labels=labels)
        for name, (text, labels) in GAUGES.items()
    }


@contextmanager
def _leaving_no_connection() -> Iterator[None]:
    """Close connections that the block opens: a metrics server uses a thread for each scrape."""
    open_before = {each.alias for each in _open_connections()}
    try:
        yield
    finally:
        for each in _open_connections():
            if each.alias not in open_before:
                each.close()


def _open_connections() -> list[Any]:
    return [each for each in connections.all(initialized_only=True) if each.connection is not None]
