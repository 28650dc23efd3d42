"""The pages of messages, records, runs and steps, in each state."""

from collections.abc import Callable
from datetime import timedelta
from typing import Final

import pytest
from django.db import connections
from django.db.models import Model
from django.test.utils import CaptureQueriesContext

from django_celery_safe.admin import pages as admin_pages
from django_celery_safe.databases import Now
from django_celery_safe.models import IdempotencyRecord, OutboxMessage, StageRun, StageStep
from django_celery_safe.sending.followed import Fault
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.pages import Page, Visitor, every_page
from tests.admin.test_lock_pages import NAMES, key_of
from tests.admin.urls import OUTBOX, RECORDS, RUNS, STEPS

#: Functions that make a row of each table, given a number.
MAKERS: Final[dict[type[Model], Callable[[int], Model]]] = {
    OutboxMessage: lambda number: rows.leave_dead(),
    IdempotencyRecord: lambda number: rows.record(f"k{number}", "running"),
    StageRun: lambda number: rows.end(rows.begin(1, 2), Status.FAILED),
    StageStep: lambda number: rows.work_on(rows.begin(1), lease=rows.OVER),
}


def count_queries(ask: Callable[[], Page]) -> int:
    """Return how many queries a page needs, the session's and the user's included."""
    with CaptureQueriesContext(connections["site"]) as queries:
        assert ask().status == 200
    return len(queries)


def test_messages(root: Visitor) -> None:
    """Messages of all states tell apart, are found by state, task and ID, and have a page."""
    waits = rows.leave(due_at=Now() + timedelta(seconds=90))
    rows.leave_failed()
    dead = rows.leave_dead(error="x" * 999)
    rows.leave_sent()
    shown = root.get(OUTBOX).rows
    assert [row["State"] for row in shown] == ["Pending", "Pending", "Dead", "Sent"]
    assert shown[0]["Reason"].startswith("due in ")
    assert "no route to host" in shown[1]["Reason"]
    assert len(shown[2]["Reason"]) <= admin_pages.LONGEST_TEXT
    for state, count in [("pending", 2), ("dead", 1), ("sent", 1), ("failed", 0)]:
        assert len(root.get(OUTBOX, state__exact=state).rows) == count
    for query, count in [("tests.app", 4), (waits.task_id, 1), ("app.tasks", 0), ("%", 0)]:
        assert len(root.get(OUTBOX, q=query).rows) == count
    fields = root.open(dead).fields
    assert (fields["Task id"], fields["Error"]) == (dead.task_id, "x" * 999)
    assert fields["Arguments"] == f"('{rows.SECRET}',)"


def test_records(root: Visitor) -> None:
    """A record that is worked on, one whose process is gone, a done and a failed one tell apart."""
    rows.record("busy", "running", rows.LEASE)
    rows.record("gone", "running", rows.OVER)
    done = rows.record("done", "done", result='{"charge": 7}')
    failed = rows.record("failed", "failed", error="declined")
    shown = root.get(RECORDS).rows
    assert {row["Key"]: row["State"] for row in shown} == {
        "busy": "Running",
        "gone": "its process is gone",
        "done": "Done",
        "failed": "Failed",
    }
    assert root.open(done).fields["Result"] == '{"charge": 7}'
    assert root.open(failed).fields["Error"] == "declined"


@pytest.mark.sql
def test_keys(root: Visitor) -> None:
    """A record of any key is listed with the whole key, shown, asked about and forgotten."""
    for name in NAMES:
        holder = rows.HOLDER._replace(task=name, task_id=name, host=name, arguments=name)
        row = rows.record(name, holder=holder)
        page = root.get(RECORDS)
        shown = [text.rstrip("…") for text in (page.rows[0]["Key"], root.open(row).fields["Key"])]
        assert all(shown)
        assert all(key_of(name).startswith(text) for text in shown)
        assert root.take(RECORDS, "forget", row.pk).find_inline() == []
        root.confirm(RECORDS, "forget", row.pk)
        assert not IdempotencyRecord.objects.exists()


@pytest.mark.sql
def test_searches(root: Visitor) -> None:
    """Records and runs are found by a part, and by a task's id."""
    rows.record(f"paid:{'7' * 300}")
    rows.record("mail:Zoë 周", holder=rows.HOLDER._replace(task_id="id-2"))
    run = rows.begin(1, key="album:7", name="Make <Ann's> album")
    rows.begin(1, key="feed:1")
    counts = dict.fromkeys(("paid:7", "id-1", "Zoë", "周", "mail:Zoë"), 1)
    for query, count in (counts | {"shop.tasks.sell": 2, "sold": 0, "Zoé": 0}).items():
        assert (query, len(root.get(RECORDS, q=query).rows)) == (query, count)
    for query in ("Ann", "bum:7"):
        assert [row["Run of stages"] for row in root.get(RUNS, q=query).rows] == [str(run)]


def test_states_of_runs(root: Visitor) -> None:
    """Runs in each state tell apart."""
    rows.begin(1, 2)
    rows.work_on(rows.begin(1, 2))
    failed = rows.end(rows.begin(1, 2), Status.FAILED)
    rows.end(rows.begin(1), Status.ABORTED, error="stopped by hand")
    run = rows.begin(1)
    StageStep.objects.filter(run=run).update(status=Status.SUCCEEDED)
    rows.end(run, Status.SUCCEEDED)
    page = root.get(RUNS)
    assert (page.texts(".safe-bad"), page.texts(".safe-good")) == (["Failed"], ["Succeeded"])
    assert [(row["Status"], row["Progress"], row["Reason"]) for row in reversed(page.rows)] == [
        ("Waiting", "0/3", "-"),
        ("Running", "0/3", "-"),
        ("Failed", "0/3", f"{failed.error_step}: ValueError: it does not work"),
        ("Aborted", "0/1", "stopped by hand"),
        ("Succeeded", "1/1", "-"),
    ]
    for status in Status:
        assert len(root.get(RUNS, status__exact=status).rows) == 1


def test_page_of_a_run(root: Visitor) -> None:
    """
    A run's page shows its stages with their progress, and leads to its steps and its object.

    A step's page has its arguments and its traceback, and leads back.
    """
    labels = {"key": "album:7", "name": "Make <Ann's> album", "url": "/albums/7/?a=1&b=2"}
    run = rows.begin(2, 3, params={"album": 7}, **labels)
    first, *_, failing = run.steps
    StageStep.objects.filter(pk=first.pk).update(status=Status.SUCCEEDED)
    fault = Fault("ValueError", "no <album>", "File\n  raise <x>")
    run.steps.filter(pk=failing.pk).record(Status.FAILED, fault)
    rows.begin(1)
    page = root.open(run)
    assert page.texts(".safe-stages tr") == [
        "Stage Priority Progress Steps",
        "1 0 1/2 1 succeeded, 1 waiting",
        "2 -1 0/3 1 failed, 2 waiting",
    ]
    assert (page.fields["Params"], page.fields["Key"]) == ('{"album": 7}', "album:7")
    links = page.values(".readonly a", "href")
    assert links == [f"../../../stagestep/?run__exact={run.pk}", labels["url"]]
    assert [row["Run"] for row in root.get(STEPS, run__exact=str(run.pk)).rows] == [str(run)] * 5
    assert len(root.get(STEPS, q="Make").rows) == 5
    page = root.open(failing)
    assert page.values(".field-run a", "href") == [every_page(StageRun, run.pk)["change"]]
    assert page.fields["Arguments"] == f'{{"name": "{rows.SECRET}"}}'
    assert page.fields["Traceback"] == "File raise <x>"


@pytest.mark.parametrize("model", MAKERS, ids=lambda model: model.__name__)
def test_queries(root: Visitor, model: type[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Pages of many rows, and those that ask about them, need no query more than those of one.

    A list counts its rows only up to a limit, and reads no bodies of messages.
    """
    pks = [MAKERS[model](0).pk]
    pages = every_page(model, pks[0])
    asks = {"discard", "forget", "abort"}.intersection(root.get(pages["list"]).decisions)

    def count() -> dict[str, int]:
        asked = {name: lambda name=name: root.get(pages[name]) for name in pages}
        asked |= {name: lambda name=name: root.take(pages["list"], name, *pks) for name in asks}
        return {name: count_queries(ask) for name, ask in asked.items()}

    count()  # Django asks for content types once in each process
    before = count()
    pks += [MAKERS[model](number).pk for number in range(1, 15)]
    assert count() == before
    assert (before["list"] <= 5, before["change"] <= 9) == (True, True)
    monkeypatch.setattr(admin_pages, "MOST_COUNTED", 7)
    with CaptureQueriesContext(connections["site"]) as queries:
        assert "7 " in " ".join(root.get(pages["list"]).texts(".paginator"))
    assert not any('"body"' in query["sql"] for query in queries)
