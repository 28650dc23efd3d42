"""The first page, "Celery safe": its figures, its chart, and what it costs."""

import re
from datetime import timedelta

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, OutboxRelay
from django_celery_safe.stages import Status
from django_celery_safe.templatetags.celery_safe_admin import HOURS, count_hours, figures
from tests.admin import rows
from tests.admin.pages import Page, Visitor, make_visitor, text_of
from tests.admin.rows import HOLDER, hold
from tests.admin.urls import FIRST
from tests.servers import RedisServer


def cards(page: Page) -> dict[str, tuple[str, ...]]:
    """Return each card of the page by its label: value, state, note, and the URL of its list."""
    found = {}
    for card in page.soup.select("li.safe-card"):
        label, *texts = (
            " ".join(map(text_of, card.select(f".safe-{name}")))
            for name in ("label", "value", "state", "note")
        )
        found[label] = (*texts, str(card.select("a")[0]["href"]))
    return found


def be_seen(ago: float) -> None:
    """Let a relay have been seen so many seconds ago."""
    OutboxRelay.objects.all().delete()
    seen_at = Now() - timedelta(seconds=ago)
    OutboxRelay.objects.bulk_create([OutboxRelay(pk=1, host="web\x1b1", pid=7, seen_at=seen_at)])


def ended(hours: float, error: str = "") -> None:
    """Let a carried task have ended so many hours ago."""
    ended_at = Now() - timedelta(hours=hours)
    rows.leave(state="failed" if error else "done", due_at=None, ended_at=ended_at)


@pytest.fixture
def _full(root: Visitor) -> None:
    """Some of everything."""
    for state in (rows.leave_dead, rows.leave_failed, rows.leave_sent, rows.leave):
        state()
    OutboxMessage.objects.pending().update(due_at=Now() - timedelta(minutes=20))
    be_seen(16)
    for hours, error in [(1.5, ""), (1.6, "ValueError"), (30, "ValueError")]:
        ended(hours, error)
    for status in (Status.FAILED, Status.SUCCEEDED):
        rows.end(rows.begin(1), status)
    hold("late", HOLDER._replace(lease=600.0), seconds=60)
    hold("feed")


@pytest.mark.usefixtures("_full")
def test_every_figure_is_a_link_to_its_rows(root: Visitor) -> None:
    """
    Each figure stands beside its state in a word, and its list has so many rows.

    The chart has a bar for each hour in which something ended; users see only what they may view.
    """
    page = root.get(FIRST)
    found = cards(page)
    _, state, note, _ = found.pop("Relay last seen")
    assert (state, note) == ("fine", "web\\x1b1 pid 7")
    assert {label: card[:3] for label, card in found.items()} == {
        "Pending": ("4", "act", "due for 20min"),
        "Failed": ("2", "act", ""),
        "Dead": ("1", "act", ""),
        "Locks overdue": ("1", "act", "of 2 held"),
        "Runs failed": ("1", "act", "in the last 24 hours"),
    }
    for label, (value, *_, url) in found.items():
        assert label == "Locks overdue" or len(root.get(url).rows) == int(value)
    for caption in page.texts(".safe-chart p")[:2]:
        assert caption.endswith(": 2 in the last 24 hours, at most 1 in an hour")
    assert page.values(".safe-chart rect", "x") == ["22.2", "23.2"] * 2
    for permission, labels, bars in [
        ("view_lock", ["Locks overdue"], 0),
        ("view_stagerun", ["Runs failed"], 2),
        ("view_idempotencyrecord", [], 0),
    ]:
        page = make_visitor(permission).get(FIRST)
        assert (list(cards(page)), len(page.soup.select("rect"))) == (labels, bars)


def test_the_relay(root: Visitor) -> None:
    """
    A relay is looked at after three minutes and acted upon after an hour.

    Without a relay the page says what to run; it is bad only where messages wait.
    """
    for ago, state in [(16, "fine"), (600, "look at it"), (9000, "act")]:
        be_seen(ago)
        assert cards(root.get(FIRST))["Relay last seen"][1] == state
    OutboxRelay.objects.all().delete()
    value, state, note, _ = cards(root.get(FIRST))["Relay last seen"]
    assert (value, state) == ("never", "look at it")
    assert "celery_outbox relay" in note
    rows.leave(due_at=Now())
    assert cards(root.get(FIRST))["Relay last seen"][1] == "act"


@pytest.mark.sql
@pytest.mark.parametrize("use_tz", [True, False])
def test_hours(
    site: str, settings: Settings, monkeypatch: pytest.MonkeyPatch, use_tz: bool
) -> None:
    """
    A row counts for the hour in which it ended, with USE_TZ or without; the future is now.

    Of more rows than are counted, the latest are.
    """
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Kolkata"
    for hours in (-2, 0.5, 3.5, 23.9, 24.1):
        ended(hours)
    done = OutboxMessage.objects.using(site).done()
    whole = [0] * HOURS
    assert count_hours(done, whole) == 4
    assert [each for each in enumerate(whole) if each[1]] == [(0, 1), (20, 1), (23, 2)]
    monkeypatch.setattr(figures, "MOST", 2)
    latest = [0] * HOURS
    assert (count_hours(done, latest), latest[-1], sum(latest)) == (2, 2, 2)


def test_sources_that_do_not_answer(root: Visitor, fragile_redis: RedisServer) -> None:
    """A source that can't be asked is "not known", with the reason, and never 0."""
    fragile_redis.stop()
    page = root.get(FIRST)
    _, state, why, _ = cards(page)["Locks"]
    assert (page.status, state) == (200, "not known")
    assert "did not answer" in why
    assert cards(page)["Pending"][0] == "0"
    with connections["site"].schema_editor() as editor:
        editor.delete_model(OutboxRelay)
    _, state, why, _ = cards(root.get(FIRST))["Outbox messages"]
    assert state == "not known"
    assert "outboxrelay" in why


@pytest.mark.sql
@pytest.mark.usefixtures("_full")
def test_queries(root: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    The page takes eight queries of its own, each with a limit.

    Each query over a table that grows goes along an index, and sorts nothing. MariaDB has no
    partial indexes: it finds failed messages and active runs by others, and sorts them.
    """
    for _ in range(30):
        rows.leave()
        rows.leave_dead()
        ended(1)
        ended(1, "ValueError")
        rows.end(rows.begin(1), Status.FAILED)
    connection = connections["site"]
    cursor = connection.cursor()
    if connection.vendor == "postgresql":
        cursor.execute("ANALYZE")
        cursor.execute("SET enable_seqscan = off")  # the tables of a test are too small
    monkeypatch.setattr(figures, "MOST", 10)  # there are more rows
    with CaptureQueriesContext(connection) as queries:
        root.get(FIRST)
    ours = [each["sql"] for each in queries if "django_celery_safe_" in each["sql"]]
    assert len(ours) == 8
    assert all(re.search(r"LIMIT (1|10)\b", sql) for sql in ours), ours
    for sql in ours:
        if OutboxRelay._meta.db_table not in sql:
            cursor.execute(f"EXPLAIN {'QUERY PLAN' * (connection.vendor == 'sqlite')} {sql}")
            plan = str(cursor.fetchall())
            assert (found := re.findall(r"safe_(?:outbox|run)_\w+", plan)), plan
            assert not re.search(r"\bSort\b|TEMP B-TREE|temporary", plan), plan
            assert "filesort" not in plan or {"safe_outbox_failed", "safe_run_active"} & {*found}
