"""The first page, "Celery safe": its figures, its chart, and what it costs."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from zoneinfo import ZoneInfo

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import Settings

from django_celery_safe.admin import overview
from django_celery_safe.databases import Now
from django_celery_safe.inspection.overview import (
    HOURS,
    Hour,
    count_failed_runs,
    last_hours,
    outbox_figures,
)
from django_celery_safe.models import OutboxMessage, OutboxRelay, StageRun
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import make_visitor
from tests.admin.pages import Page, Visitor
from tests.admin.rows import HOLDER, hold
from tests.locks.conftest import fragile_redis
from tests.servers import RedisServer

__all__ = ["fragile_redis"]

FIRST: Final = "/admin/django_celery_safe/"
OUTBOX: Final = f"{FIRST}outboxmessage/"


def cards(page: Page) -> dict[str, dict[str, Any]]:
    """Return each card of the page by its label: value, state, level, note and url."""
    found = {}
    for card in page.root.find("li", class_="safe-card"):
        texts = {
            name: " ".join(each.text for each in card.find(class_=f"safe-{name}"))
            for name in ("label", "value", "state", "note")
        }
        level = [each.removeprefix("safe-") for each in card.classes if each != "safe-card"]
        url = card.find("a")[0].attributes["href"]
        found[texts["label"]] = {**texts, "level": level, "url": url}
    return found


def be_seen(ago: float) -> None:
    """Let a relay have been seen so many seconds ago."""
    OutboxRelay.objects.all().delete()
    seen_at = Now() - timedelta(seconds=ago)
    OutboxRelay.objects.bulk_create([OutboxRelay(pk=1, host="web\x1b1", pid=7, seen_at=seen_at)])


def ended(hours: float, error: str = "") -> None:
    """Let a carried task have ended so many hours ago."""
    rows.leave(due_at=None, ended_at=Now() - timedelta(hours=hours), error_type=error)


@pytest.fixture
def _full(root: Visitor) -> None:
    """Some of everything."""
    for state in (rows.leave_dead, rows.leave_failed, rows.leave_sent, rows.leave):
        state()
    OutboxMessage.objects.pending().update(
        created_at=Now() - timedelta(minutes=30), due_at=Now() - timedelta(minutes=20)
    )
    be_seen(16)
    ended(1.5)
    ended(1.6, "ValueError")
    ended(30, "ValueError")
    rows.end(rows.begin(1), Status.FAILED)
    rows.end(rows.begin(1), Status.SUCCEEDED)
    hold("feed")


@pytest.mark.usefixtures("_full")
def test_every_figure_is_a_link_to_its_rows(root: Visitor) -> None:
    """
    Each figure stands beside its state in a word, and its list has so many rows.

    A chart has successes above the line and failures below it, and a table with the numbers.
    """
    page = root.get(FIRST)
    found = cards(page)
    seen = found.pop("Relay last seen")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:]{8} UTC, web\\x1b1 pid 7", seen["note"])
    assert [(label, card["value"], card["state"]) for label, card in found.items()] == [
        ("Pending", "4", ""),
        ("Oldest pending", "30min", "stuck"),
        ("Failed", "2", "decide"),
        ("Dead", "1", "decide"),
        ("Locks overdue", "0", "none"),
        ("Runs failed today", "1", "decide"),
    ]
    assert found["Oldest pending"]["note"] == "due for 20min"
    for label, card in found.items():
        shown = root.get(card["url"])
        assert shown.status == 200
        if label not in ("Oldest pending", "Locks overdue"):
            assert len(shown.rows) == int(card["value"])
    (svg,) = page.root.find("svg", role="img")
    assert svg.attributes["aria-label"] == "In the last 24 hours 2 ended well and 2 failed."
    (line,) = svg.find("line")
    above, below = svg.find("rect", class_="safe-done"), svg.find(class_="safe-failed")
    assert len(above) == len(below) == 2
    for bar in above:
        bottom = float(bar.attributes["y"]) + float(bar.attributes["height"])
        assert bottom == pytest.approx(float(line.attributes["y1"]), abs=0.2)
    assert {bar.attributes["y"] for bar in below} == {line.attributes["y1"]}
    (table,) = page.root.find("details")
    texts = [row.text for row in table.find("tr")]
    assert len(texts) == 1 + HOURS
    assert texts[-2:] == ["2 to 1 h ago 1 1", "1 to 0 h ago 1 1"]
    for permission, labels in [
        ("view_lock", ["Locks overdue"]),
        ("view_stagerun", ["Runs failed today"]),
        ("view_idempotencyrecord", []),
    ]:
        page = make_visitor(permission).get(FIRST)
        assert list(cards(page)) == labels
        assert ("1 ended well and 1 failed" in page.content) == (permission == "view_stagerun")


def test_the_relay(root: Visitor) -> None:
    """
    A relay is late after three minutes and gone after an hour; the list says it, too.

    Without a relay the page says what to run; it is bad only where messages wait.
    """
    for ago, level, state in [(16, "good", "here"), (600, "look", "late"), (9000, "bad", "gone")]:
        be_seen(ago)
        card = cards(root.get(FIRST))["Relay last seen"]
        assert (card["level"], card["state"]) == ([level], state)
        assert re.search(rf"Relay last seen: \S+ ago {state} ", root.get(OUTBOX).content)
    OutboxRelay.objects.all().delete()
    page = root.get(FIRST)
    found = cards(page)
    assert {found[label]["value"] for label in ("Pending", "Failed", "Dead")} == {"0"}
    assert found["Oldest pending"]["value"] == "-"
    assert "bad" not in {level for card in found.values() for level in card["level"]}
    card = found["Relay last seen"]
    assert (card["value"], card["level"]) == ("never", ["look"])
    assert "celery_outbox relay" in card["note"]
    rows.leave(due_at=Now())
    assert cards(root.get(FIRST))["Relay last seen"]["level"] == ["bad"]


def test_overdue_locks(root: Visitor, settings: Settings, redis_cache_settings: Any) -> None:
    """A lock that its holder should have renewed is bad; one that is renewed is not."""
    settings.CACHES = redis_cache_settings("django-redis")
    hold("late", HOLDER._replace(lease=600.0), seconds=60)
    hold("feed")
    card = cards(root.get(FIRST))["Locks overdue"]
    assert (card["value"], card["note"], card["level"]) == ("1", "of 2 held", ["bad"])


# The chart


def test_hours_that_are_not_counted_whole(root: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the page says which hours show too few; a row of the future is of now."""
    for _ in range(3):
        ended(-2)
        ended(5.5)
    found = last_hours("site", "site", 4)
    assert (found.counted, found.hours[-1].done, found.hours[-6].done) == (5, 3, 2)
    monkeypatch.setattr(overview, "MOST", 4)
    page = root.get(FIRST)
    assert "Only the last 4 of each kind are counted" in page.content
    assert len(page.root.find("rect", class_="safe-uncounted")) == HOURS - 5
    assert "6 to 5 h ago 2+ 0+" in page.content


# Times


@pytest.mark.sql
def test_without_time_zones(site: str, settings: Settings) -> None:
    """Hours and days are right with USE_TZ = False, where some databases keep UTC all the same."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    ended(0.5)
    run = rows.begin(1)
    rows.end(run, Status.FAILED)
    ended(3.5, "ValueError")
    hours = last_hours(site, site, 9).hours
    assert hours[-1] == Hour(1, 1)
    assert hours[-4] == Hour(0, 1)
    assert sum(map(sum, hours)) == 3
    StageRun.objects.filter(pk=run.pk).update(ended_at=Now() - timedelta(minutes=20))
    found = [count_failed_runs(site, timedelta(minutes=age), 9).number for age in (10, 30)]
    assert found == [0, 1]


def test_the_day_begins_at_midnight() -> None:
    """At noon it is as many hours old as it had, also where the clocks were changed."""
    with timezone.override("Europe/Berlin"):
        for day, hours in [("03-29", 11), ("03-30", 12), ("10-25", 13)]:
            noon = datetime.fromisoformat(f"2026-{day}T12:00").replace(
                tzinfo=ZoneInfo("Europe/Berlin")
            )
            assert noon.astimezone(UTC) - overview.last_midnight(noon) == timedelta(hours=hours)


def test_sources_that_do_not_answer(root: Visitor, fragile_redis: RedisServer) -> None:
    """A source that can't be asked is "not known", with the reason, and never 0."""
    fragile_redis.stop()
    page = root.get(FIRST)
    assert page.status == 200
    assert cards(page)["Locks"]["state"] == "not known"
    assert cards(page)["Pending"]["value"] == "0"
    assert page.error.startswith("Locks: ")
    with connections["site"].schema_editor() as editor:
        editor.delete_model(OutboxRelay)
    page = root.get(FIRST)
    assert cards(page)["Outbox"]["state"] == "not known"
    assert "outboxrelay" in page.error


# Costs


@pytest.mark.usefixtures("_full")
def test_queries(root: Visitor) -> None:
    """The page takes eight queries of its own, however many rows there are, each with a limit."""
    root.get(FIRST)
    for _ in range(2):
        with CaptureQueriesContext(connections["site"]) as queries:
            root.get(FIRST)
        ours = [each["sql"] for each in queries if "django_celery_safe_" in each["sql"]]
        assert len(ours) == 8
        assert all(re.search(r"LIMIT (1|10001)\b", sql) for sql in ours), ours
        rows.leave()
        rows.begin(3)


#: The indexes that the queries of the page and of a scrape may use.
INDEXES: Final = (
    "safe_outbox_due", "safe_outbox_failed", "safe_outbox_dead", "safe_outbox_done",
    "safe_run_ended",
)  # fmt: skip


@pytest.mark.sql
def test_indexes(site: str) -> None:
    """
    Each query over a table that grows goes along an index, and sorts nothing.

    MariaDB has no index of the failed messages alone: it finds them by another, and sorts them.
    """
    for _ in range(30):
        rows.leave()
        rows.leave_dead()
        ended(1)
        ended(1, "ValueError")
        rows.end(rows.begin(1), Status.FAILED)
    connection = connections[site]
    cursor = connection.cursor()
    if connection.vendor == "postgresql":
        cursor.execute("ANALYZE")
        cursor.execute("SET enable_seqscan = off")  # the tables of a test are too small
    with CaptureQueriesContext(connection) as queries:
        outbox_figures(site, 10)
        last_hours(site, site, 10)
    plans = []
    for query in queries:
        if OutboxRelay._meta.db_table not in query["sql"]:
            explain = "EXPLAIN QUERY PLAN " if connection.vendor == "sqlite" else "EXPLAIN "
            cursor.execute(explain + query["sql"])
            plans.append(str(cursor.fetchall()))
    assert len(plans) == 6
    for plan in plans:
        assert any(name in plan for name in INDEXES), plan
        assert not re.search(r"\bSort\b|TEMP B-TREE|temporary", plan), plan
        if "safe_outbox_failed" not in plan:
            assert "filesort" not in plan
