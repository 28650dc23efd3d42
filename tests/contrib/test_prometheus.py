"""Metrics: the figures of tables and locks, and the counter of events."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, Final

import prometheus_client
import pytest
from django.core.handlers.base import BaseHandler
from django.db import connections
from django.dispatch import Signal
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pytest_django import Settings

from django_celery_safe import cache_lock, signals
from django_celery_safe.contrib import prometheus
from django_celery_safe.contrib.prometheus import COUNTER, GAUGES, LABELS, PREFIX, TableCollector
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, OutboxRelay, StageStep
from tests.admin import rows
from tests.admin.conftest import _as_new, site
from tests.admin.rows import HOLDER, hold
from tests.docs.pages import ROOT, page
from tests.servers import RedisServer
from tests.servers.databases import gone_settings, registered

__all__ = ["_as_new", "site"]

DASHBOARD: Final = ROOT / "docs" / "dashboards" / "celery-safe.json"
DEPLOY: Final = "docs/how-to/deploy.md"

Samples = dict[tuple[str, ...], float]


def scrape() -> Samples:
    """Return the values of a scrape, by metric and labels, without our prefix."""
    registry = CollectorRegistry()
    registry.register(TableCollector())
    return samples_of(registry)


def samples_of(registry: CollectorRegistry) -> Samples:
    """Return the values of a registry, by metric and labels that are not empty."""
    return {
        (sample.name.removeprefix(PREFIX), *filter(None, sample.labels.values())): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


# Figures of the tables


@pytest.mark.usefixtures("in_redis")
def test_figures(site: str, settings: Settings) -> None:
    """
    Messages, runs, steps and locks are counted by what they are, with their ages.

    A relay was seen at the right moment with USE_TZ = False, too, where SQLite keeps UTC.
    """
    rows.leave(due_at=Now() - timedelta(seconds=30))
    rows.leave()
    rows.leave(due_at=Now() + timedelta(seconds=60), state="sent", attempt="a")
    rows.leave(due_at=Now() + timedelta(seconds=60), state="running", attempt="b")
    rows.leave(state="failed", due_at=None, ended_at=Now())
    rows.leave_dead()
    rows.leave_sent()
    OutboxRelay.objects.create(pk=1, host="web1", pid=7, seen_at=Now())
    rows.begin(2)
    OutboxMessage.objects.exclude(attempt__in=["", "b"]).update(resent=1)
    rows.work_on(rows.begin(1))
    hold("feed")
    hold("sent:feed", HOLDER._replace(host="", pid=0, renewed=False))
    found = scrape()
    state = ("outbox_messages", site)
    expected = {
        # Two of them, and a message for each step that waits; one runs.
        (*state, "pending"): 4, (*state, "sent"): 1, (*state, "running"): 2,
        (*state, "failed"): 1, (*state, "dead"): 1,
        ("stage_runs", site, "waiting"): 1, ("stage_runs", site, "running"): 1,
        ("stage_steps_overdue", site): 2,
        ("locks_held", "run"): 1, ("locks_held", "message"): 1, ("locks_held", "marker"): 0,
        ("locks_overdue",): 0,
        ("up", "outbox", site): 1, ("up", "stages", site): 1, ("up", "locks"): 1,
    }  # fmt: skip
    assert {key: found[key] for key in expected} == expected
    assert 30 <= found["outbox_lag_seconds", site] < 90
    seen = OutboxRelay.objects.get().seen_at.timestamp()
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    for each in (found, scrape()):
        assert each["relay_last_seen_timestamp_seconds", site] == pytest.approx(seen, abs=2)


def test_sources_that_do_not_answer(site: str, fragile_redis: RedisServer) -> None:
    """Their figures are missing, and not zero, and their ``up`` is 0; those of others are there."""
    rows.leave()
    fragile_redis.stop()
    with registered("gone", gone_settings()):
        found = scrape()
    assert found["up", "locks"] == found["up", "outbox", "gone"] == 0
    assert not [key for key in found if key[0].startswith("locks_")]
    assert [key for key in found if "gone" in key] == [("up", "outbox", "gone")]
    assert found["outbox_messages", site, "pending"] == 1
    with connections[site].schema_editor() as editor:
        editor.delete_model(StageStep)
        editor.delete_model(OutboxRelay)
    found = scrape()
    assert found["up", "outbox", site] == found["up", "stages", site] == 0
    assert [key for key in found if key[0] != "up" and site in key] == []


def test_connections(site: str) -> None:
    """A registration asks no database; a thread that scrapes has no connection at its end."""
    with CaptureQueriesContext(connections[site]) as queries:
        CollectorRegistry(auto_describe=True).register(TableCollector())
    assert len(queries) == 0

    def ask() -> bool:
        scrape()
        return connections[site].connection is None

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ask).result()


# The counter of events


def test_each_signal_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name, and by those of its fields that are labels; also for a second registry."""
    sent = {name: one for name, one in vars(signals).items() if isinstance(one, Signal)}
    for one in sent.values():
        monkeypatch.setattr(one, "receivers", [*one.receivers])
    registries = [CollectorRegistry(), CollectorRegistry()]
    for registry in registries:
        prometheus.count_events(registry)
    for one in sent.values():
        one.send(sender=None, task="shop.tasks.Sell", name="feed", kept=False)
    for registry in registries:
        assert samples_of(registry) == {
            ("events_total", name, "shop.tasks.Sell", "False"): 1 for name in sent
        }


# Names, the dashboard and the docs


METRICS: Final = {PREFIX + name: labels for name, (_, labels) in GAUGES.items()}
METRICS[f"{PREFIX}{COUNTER}_total"] = LABELS


def names_of(queries: str) -> set[str]:
    """Return the names of our metrics in queries."""
    return set(re.findall(r"\bcelery_safe_\w+", queries))


@pytest.mark.repository
def test_dashboard_and_alerts() -> None:
    """The queries of the sample dashboard and of the how-to ask for what is exported."""
    found = re.findall(r'"expr": (".*")', DASHBOARD.read_text("utf-8"))
    queries = list(map(json.loads, found))
    assert len(queries) > 10
    assert names_of(" ".join(queries)) <= METRICS.keys()
    for query in queries:
        (name,) = names_of(query)
        grouped = re.findall(r"\bby \(([^)]*)\)", query)
        used = {each.strip() for text in grouped for each in text.split(",")}
        used |= set(re.findall(r'(\w+)(?:=|!=|=~|!~)"', query))
        assert used <= {*METRICS[name], "instance"}, query
    (rules,) = (each for each in page(DEPLOY).blocks() if each.code.startswith("groups:"))
    assert names_of(rules.code)
    assert names_of(rules.code) <= METRICS.keys()


@pytest.mark.repository
def test_the_view_of_the_how_to(
    site: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has every source, also where each request is a transaction that the locks live in."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": site}
    monkeypatch.setitem(connections.settings[site], "ATOMIC_REQUESTS", True)
    registry = CollectorRegistry()
    monkeypatch.setattr(prometheus_client, "REGISTRY", registry)
    monkeypatch.setattr(prometheus_client, "generate_latest", partial(generate_latest, registry))
    (view,) = (each for each in page(DEPLOY).blocks() if "def metrics(" in each.code)
    names: dict[str, Any] = {}
    leaves = "@transaction.non_atomic_requests"  # of the default database
    assert leaves in view.code
    exec(view.code.replace(leaves, f"{leaves}(using={site!r})"), names)
    with cache_lock("feed"):
        answer = BaseHandler().make_view_atomic(names["metrics"])(RequestFactory().get("/metrics"))
    families = text_string_to_metric_families(answer.content.decode())
    (up,) = (family for family in families if family.name == f"{PREFIX}up")
    assert {one.labels["source"]: one.value for one in up.samples} == {
        "outbox": 1, "stages": 1, "locks": 1,
    }  # fmt: skip
