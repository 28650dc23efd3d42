"""
Metrics for Prometheus: figures of the tables and locks, and a counter of events.

It needs the extra ``prometheus``. :class:`TableCollector` queries the databases and the store of
the locks at each scrape, so only one process needs to export it. :func:`count_events` counts the
events of its own process, so every process calls it. docs/reference/signals.md lists the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, TypeAlias

from django.db import close_old_connections, router
from django.dispatch import Signal
from prometheus_client import REGISTRY, CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .. import signals
from ..databases import read_moment
from ..exceptions import ConfigurationError
from ..inspection import overview
from ..locks.stores import get_store
from ..models.stages import StageRun
from ..sending.outbox import outbox_aliases
from ..stages import Status
from ..stages.engine import table_in
from ..texts import describe_error, get_logger

logger = get_logger(__name__)

#: A value of a gauge: the gauge's name, the value, and those of the labels.
Sample: TypeAlias = tuple[str, float, tuple[str, ...]]

#: The prefix of every metric's name.
PREFIX: Final = "celery_safe_"

#: The gauges, with the help text and the labels of each.
GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "up": ("Whether the source of figures answered.", ("source", "database")),
    "outbox_messages": ("Messages in the outbox, by their state.", ("database", "state")),
    "outbox_lag_seconds": ("For how long the longest due message is due.", ("database",)),
    "outbox_checkpoint_age_seconds": ("Age of a running task's last checkpoint.", ("database",)),
    "relay_last_seen_timestamp_seconds": ("When a relay was seen last.", ("database",)),
    "locks_held": ("Locks that are held, by what holds them.", ("kind",)),
    "locks_overdue": ("Locks that their holder should have renewed by now.", ()),
    "stage_runs": ("Runs of stages that have not ended.", ("database", "status")),
    "stage_steps_overdue": ("Steps that no worker began in time.", ("database",)),
}

#: The counter of events. A label is empty if the event has no such field.
COUNTER: Final = "events"
LABELS: Final = ("event", "task", "relayed", "kept", "on_conflict", "status")


def count_events(registry: CollectorRegistry = REGISTRY) -> None:
    """
    Count this process's signals from now on; call it once.

    Call it in ``ready()`` of an app of the project, so that all processes count; combine those of
    a worker's children with the multiprocess mode of prometheus_client.

    Args:
        registry: The registry of the counter.
    """
    counter = Counter(PREFIX + COUNTER, "Signals that were sent.", LABELS, registry=registry)
    for name, signal in vars(signals).items():
        if isinstance(signal, Signal):
            signal.connect(partial(_count, counter, name), weak=False)


def _count(counter: Counter, event: str, **fields: Any) -> None:
    values = {"event": event, **fields}
    counter.labels(*(str(values.get(label, "")) for label in LABELS)).inc()


class TableCollector(Collector):
    """
    The figures of tables and locks, queried at each scrape.

    If a source does not answer, its ``celery_safe_up`` is 0 and its other figures are left out.
    A store that can't list its locks, or that processes don't share, is not a source.

    Example:
        REGISTRY.register(TableCollector())
    """

    def describe(self) -> Iterable[Metric]:
        """Return the metrics without values, so registering the collector queries no database."""
        return list(_make_families().values())

    def collect(self) -> Iterable[Metric]:
        """Query every source, even if another source fails, and return the figures."""
        families = _make_families()
        try:
            for name, value, labels in self._iter_samples():
                families[name].add_metric(labels, value)
        finally:
            close_old_connections()  # as at the end of a request: a metrics server has none
        return list(families.values())

    def _iter_samples(self) -> Iterator[Sample]:
        for alias in outbox_aliases():
            yield from self._ask("outbox", alias, _read_outbox)
        yield from self._ask("stages", router.db_for_write(StageRun), _read_stages)
        yield from self._ask("locks", "", _read_locks)

    def _ask(
        self, source: str, alias: str, read: Callable[[str], Iterable[Sample]]
    ) -> list[Sample]:
        """Return a source's figures; none if there is no such source, or if it fails."""
        try:
            samples = list(read(alias))
            return [*samples, ("up", 1, (source, alias))] if samples else []
        except ConfigurationError:
            return []
        except Exception as error:  # noqa: BLE001 - a scrape reports whatever keeps it from asking
            logger.warning("The metrics of %s can't be asked: %s", source, describe_error(error))
            return [("up", 0, (source, alias))]


def _read_outbox(alias: str) -> Iterator[Sample]:
    figures = overview.outbox_figures(alias)
    for state, number in figures.counts.items():
        yield "outbox_messages", number, (alias, state)
    yield "outbox_lag_seconds", figures.lag_s, (alias,)
    yield "outbox_checkpoint_age_seconds", figures.checkpoint_s, (alias,)
    if figures.relay is not None:
        seen_at = read_moment(alias, figures.relay.seen_at)
        yield "relay_last_seen_timestamp_seconds", seen_at.timestamp(), (alias,)


def _read_stages(alias: str) -> Iterator[Sample]:
    table = table_in(alias)
    for status in (Status.WAITING, Status.RUNNING):
        runs = table.runs.active().filter(status=status)
        yield "stage_runs", overview.count(runs), (alias, str(status))
    yield "stage_steps_overdue", overview.count(table.steps.overdue()), (alias,)


def _read_locks(_: str) -> Iterator[Sample]:
    if not get_store().shared:
        return
    held, overdue = overview.lock_figures()
    for kind, number in held.items():
        yield "locks_held", number, (kind,)
    yield "locks_overdue", overdue, ()


def _make_families() -> dict[str, GaugeMetricFamily]:
    return {
        name: GaugeMetricFamily(PREFIX + name, text, labels=labels)
        for name, (text, labels) in GAUGES.items()
    }
