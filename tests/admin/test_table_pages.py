"""The pages of messages, records, runs and steps, in each state."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.db import connections
from django.db.models import Model
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from django_celery_safe.databases import Now
from django_celery_safe.models import IdempotencyRecord, Lock, OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import every_page
from tests.admin.pages import Visitor, count_queries
from tests.admin.test_lock_pages import LIST as LOCKS
from tests.admin.test_lock_pages import NAMES, key_of
from tests.checking import app_without_tasks

OUTBOX: Final = "/admin/django_celery_safe/outboxmessage/"
RECORDS: Final = "/admin/django_celery_safe/idempotencyrecord/"
RUNS: Final = "/admin/django_celery_safe/stagerun/"
STEPS: Final = "/admin/django_celery_safe/stagestep/"

#: Functions that make a row of each table, given a number.
MAKERS: Final[dict[type[Model], Callable[[int], Model]]] = {
    OutboxMessage: lambda number: rows.leave_dead(),
    IdempotencyRecord: lambda number: rows.record(f"k{number}", "running"),
    StageRun: lambda number: rows.end(rows.begin(1, 2), Status.FAILED),
    StageStep: lambda number: rows.work_on(rows.begin(1), lease=rows.OVER),
}
every_table = pytest.mark.parametrize("model", MAKERS, ids=lambda model: model.__name__)


# The outbox


def test_messages(root: Visitor) -> None:
    """Messages of all states tell apart, are found by state, task and ID, and have a page."""
    waits = rows.leave(due_at=Now() + timedelta(seconds=90))
    rows.leave(due_at=Now() - timedelta(seconds=90))
    rows.leave_failed("no route to host")
    dead = rows.leave_dead("x" * 999)
    rows.leave_sent()
    shown = root.get(OUTBOX).rows
    assert [row["State"] for row in shown] == ["pending", "pending", "pending", "dead", "sent"]
    assert [row["Due"].split()[0] for row in shown] == ["in", "now", "in", "-", "-"]
    assert [row["Error"] for row in shown[2:4]] == ["no route to host", f"{'x' * 99}…"]
    for state, count in [("pending", 3), ("dead", 1), ("sent", 1)]:
        assert [row["State"] for row in root.get(OUTBOX, state=state).rows] == [state] * count
        assert root.get(OUTBOX, state=state, _facets="True").status == 200
    for query, count in [("tests.app", 5), (waits.task_id, 1), ("app.tasks", 0), ("%", 0)]:
        assert len(root.get(OUTBOX, q=query).rows) == count
    assert "Null characters are not allowed." in root.get(OUTBOX, q="\x00").messages
    fields = root.open(dead).fields
    assert (fields["Task id"], fields["Error"]) == (dead.task_id, "x" * 999)
    assert fields["Arguments"] == f"('{rows.SECRET}',)"


def test_filter_calls_nothing_else(root: Visitor) -> None:
    """A state that is none changes nothing, whatever method of the table has its name."""
    rows.leave_dead()
    before = list(OutboxMessage.objects.values())
    for state in ("erase", "discard", "revive", "delete", "x", "__str__"):
        page = root.get(OUTBOX, state=state)
        assert (page.status, page.response["Location"]) == (302, f"{OUTBOX}?e=1")
        root.take(f"{OUTBOX}?state={state}", "discard", before[0]["id"], confirmed="1")
    assert list(OutboxMessage.objects.values()) == before


def test_message_changed_by_hand(root: Visitor) -> None:
    """A message that makes no sense any more is shown; arguments that steer are escaped."""
    deep = "[" * 10_000
    odd = '{"options": {"headers": {"argsrepr": "(\\ud800 \\u202e)", "kwargsrepr": "{}"}}}'
    texts = dict.fromkeys(("", "null", "{", '{"options": {"headers": 7}}', deep), "-")
    for properties, shown in {**texts, odd: "(\\ud800 \\u202e)"}.items():
        row = rows.leave(properties=properties)
        page = root.open(row)
        assert (page.status, page.fields["Arguments"]) == (200, shown)


def test_what_is_not_shown_is_not_guessed(root: Visitor) -> None:
    """No URL narrows a list by a column that it does not show."""
    lookups = {OUTBOX: "body", RECORDS: "result", RUNS: "params_text", STEPS: "run__params_text"}
    for url, column in lookups.items():
        assert root.get(url, **{f"{column}__contains": "a"}).status == 400


# Records


def test_records(root: Visitor) -> None:
    """A record that is worked on, one whose process is gone, a done and a failed one tell apart."""
    rows.record("busy", "running", rows.LEASE)
    rows.record("gone", "running", rows.OVER)
    done = rows.record("done", "done", result='{"charge": 7}')
    failed = rows.record("failed", "failed", error="declined")
    shown = root.get(RECORDS).rows
    assert {row["Key"]: row["State"] for row in shown} == {
        "busy": "running",
        "gone": "running, its process is gone",
        "done": "done",
        "failed": "failed",
    }
    assert root.open(done).fields["Result"] == '{"charge": 7}'
    assert root.open(failed).fields["Error"] == "declined"


@pytest.mark.sql
def test_keys(root: Visitor) -> None:
    """A record of any key is listed with the whole key, shown, asked about and forgotten."""
    for name in NAMES.values():
        row = rows.record(
            name, holder=rows.HOLDER._replace(task=name, task_id=name, host=name, arguments=name)
        )
        page = root.get(RECORDS)
        assert [shown["Key"] for shown in page.rows] == [key_of(name)]
        assert every_page(IdempotencyRecord, row.pk)["change"] in page.links
        assert root.open(row).fields["Key"] == key_of(name)
        asked = root.take(RECORDS, "forget", row.pk)
        assert key_of(name) in asked.content
        assert asked.find_inline() == []
        told = root.confirm(RECORDS, "forget", *asked.selections)
        assert told.messages == ["1 idempotency record was forgotten."]
        assert not IdempotencyRecord.objects.exists()


@pytest.mark.sql
def test_searches(root: Visitor) -> None:
    """Records and runs are found by a beginning or part, in small letters, and by a task's id."""
    rows.record(f"paid:{'7' * 300}")
    for query in ("paid:7", "id-1", "shop.tasks.sell"):
        assert len(root.get(RECORDS, q=query).rows) == 1
    assert root.get(RECORDS, q="sold").rows == []
    rows.record("mail:Zoë 周")
    for query in ("Zoë", "周", "mail:Zoë", "ZO"):
        assert len(root.get(RECORDS, q=query).rows) == 1
    assert root.get(RECORDS, q="Zoé").rows == []
    run = rows.begin(1, key="album:7", name="Make <Ann's> album")
    rows.begin(1, key="feed:1")
    for query in ("Ann", "bum:7", "ann", "ALBUM:7"):
        found = [row["Run"] for row in root.get(RUNS, q=query).rows]
        assert found == [f"Run {run.pk} (Make <Ann's> album)"]
    assert root.get(RUNS, q="bob").rows == []


# Runs and steps


def test_states_of_runs_and_steps(root: Visitor) -> None:
    """Runs, and steps, in each state tell apart, in the lists and on their pages."""
    waits = rows.begin(1, 2)
    busy = rows.work_on(rows.begin(1, 2))
    gone = rows.work_on(rows.begin(1, 2), rows.OVER)
    failed = rows.end(rows.begin(1, 2), Status.FAILED)
    rows.end(rows.begin(1), Status.ABORTED, error="stopped by hand")
    run = rows.begin(1)
    StageStep.objects.filter(run=run).update(status=Status.SUCCEEDED)
    rows.end(run, Status.SUCCEEDED)
    page = root.get(RUNS)
    for level, states in {"safe-bad": ["Failed"], "safe-good": ["Succeeded"]}.items():
        assert [state.text for state in page.root.find("span", class_=level)] == states
    names = ("Status", "Progress", "Stage", "Error")
    assert [[row[name] for name in names] for row in reversed(page.rows)] == [
        ["Waiting", "0/3", "1 of 2", "-"],
        ["Running", "0/3", "1 of 2", "-"],
        ["Running", "0/3", "1 of 2", "-"],
        ["Failed", "0/3", "1 of 2", "ValueError: it does not work"],
        ["Aborted", "0/1", "1 of 1", "stopped by hand"],
        ["Succeeded", "1/1", "1 of 1", "-"],
    ]
    for status, count in [(Status.RUNNING, 2), (Status.FAILED, 1), (Status.SUCCEEDED, 1)]:
        assert len(root.get(RUNS, status__exact=status, _facets="True").rows) == count
    assert {row["Process"] for row in root.get(STEPS).rows} == {
        *("-", "pid 42 on web1", "pid 42 on web1, gone"),
    }
    assert root.open(busy).fields["Lease left"] == "10min"
    assert root.open(gone).fields["Lease left"] == "0.0s"
    assert root.open(failed.error_step).fields["Error"] == "ValueError: it does not work"
    first, *_, later = waits.steps
    assert root.open(first).fields["Waiting since"].startswith("2")
    assert root.open(later).fields["Waiting since"] == "-"


def test_page_of_a_run(root: Visitor) -> None:
    """
    A run's page shows its stages with their progress, and leads to its steps and its object.

    It has the failed step first, with its arguments; the step's own page has the traceback.
    """
    labels = {"key": "album:7", "name": "Make <Ann's> album", "url": "/albums/7/?a=1&b=2"}
    run = rows.begin(2, 3, params={"album": 7}, **labels)
    first, *_, failing = run.steps
    StageStep.objects.filter(pk=first.pk).update(status=Status.SUCCEEDED)
    failed = run.steps.filter(pk=failing.pk)
    failed.update(started_at=run.created_at)
    failed.fail("ValueError", "no <album>", 'File "a.py"\n  raise <x>\nV')
    rows.begin(1)
    page = root.open(run)
    (table,) = page.root.find("table", class_="safe-stages")
    assert [line.text for line in table.find("tr")] == [
        "Stage Priority Progress Steps",
        "1 0 1/2 1 succeeded, 1 waiting",
        "2 -1 0/3 1 failed, 2 waiting",
    ]
    bars = [(bar.attributes["max"], bar.attributes["value"]) for bar in table.find("progress")]
    assert bars == [("2", "1"), ("3", "0")]
    (table,) = page.root.find("table", class_="safe-steps")
    shown, error = [line.text for line in table.find("tr")[1:3]]
    assert shown.startswith(f'{failing.task} {{"name": "{rows.SECRET}"}} 2 failed ')
    assert error == "ValueError: no <album>"
    assert (page.fields["Params"], page.fields["Key"]) == ('{"album": 7}', "album:7")
    assert labels["url"] in page.links
    title = f"Run {run.pk} (Make <Ann's> album)"
    (steps,) = {link for link in page.links if link.startswith(f"{STEPS}?")}
    assert [row["1 Run"] for row in root.get(steps).rows] == [title] * 5
    assert len(root.get(STEPS, q="Make").rows) == 5
    fields = root.open(failing).fields
    assert fields["Run"] == title
    assert fields["Traceback"].split() == ["File", '"a.py"', "raise", "<x>", "V"]


def test_steps_that_wait(root: Visitor, caplog: pytest.LogCaptureFixture) -> None:
    """A step says since when it waits, and if the project has no such task, if that is known."""
    run = rows.begin(1, 1)
    run.steps.update(task="shop.tasks.renamed")
    (table,) = root.open(run).root.find("table", class_="safe-steps")
    texts = [line.text for line in table.find("tr")]
    assert "1 waiting since 2" in texts[1]
    assert "NotRegistered: This project has no task of this name" in texts[2]
    assert "since" not in texts[3]
    with app_without_tasks("memory://") as app:
        app.conf.include = ["no_such_module_of_tasks"]
        assert "NotRegistered" not in root.open(run).content
    assert "The project's tasks can't be loaded: ModuleNotFoundError" in caplog.text


# All of them


@pytest.mark.sql
def test_no_such_row(root: Visitor) -> None:
    """The page of a row that is gone, or that never can be, leads back to the start."""
    for model in MAKERS:
        for pk in ("99", "x", "\x00", "9" * 30, "-1"):
            for name in ("change", "history"):
                page = root.get(every_page(model, pk)[name])
                assert (page.status, page.response["Location"]) == (302, "/admin/")
    for name in NAMES.values():
        typed = quote(name).encode("utf-8", "replace")
        url = "/admin/django_celery_safe/lock/" + "".join(f"%{byte:02X}" for byte in typed)
        for page_name in ("change", "history"):
            assert root.get(f"{url}/{page_name}/").status in (200, 302, 404), name


@every_table
def test_lists(root: Visitor, model: type[Model]) -> None:
    """
    A list says what its rows are, and, while it is empty, when there will be some.

    Pages of many rows, and those that ask about them, need no query more than those of one.
    """
    shown: Any = site._registry[model]
    texts = [str(shown.help_text), str(shown.empty_text)]
    assert all(texts)
    url = every_page(model, 1)["list"]
    empty = root.get(url)
    assert (empty.status, empty.rows) == (200, [])
    pks = [MAKERS[model](0).pk]
    filled = root.get(url)
    assert [text in empty.content for text in texts] == [True, True]
    assert [text in filled.content for text in texts] == [True, False]

    def count() -> dict[str, int]:
        pages = every_page(model, pks[0])
        asked = {name: lambda name=name: root.get(pages[name]) for name in pages}
        for decision in filled.decisions:
            asked[decision] = lambda decision=decision: root.take(url, decision, *pks)
        return {name: count_queries(ask) for name, ask in asked.items()}

    before = count()
    pks += [MAKERS[model](number).pk for number in range(1, 15)]
    assert count() == before
    assert before["list"] <= 6
    assert before["change"] <= 8


def test_what_pages_read(root: Visitor) -> None:
    """A run's page needs no query for each step; a list does not read the bodies of messages."""
    small, large = rows.begin(1, 1), rows.begin(*[10] * 10)
    assert count_queries(lambda: root.open(large)) == count_queries(lambda: root.open(small))
    with CaptureQueriesContext(connections["site"]) as queries:
        assert root.get(OUTBOX).rows
    assert not any("body" in query["sql"] for query in queries)


def test_arguments_hidden(root: Visitor, settings: Settings) -> None:
    """
    Without SHOW_ARGUMENTS no page shows arguments or params, nor what asks for a decision.

    Nor does the log; of locks, messages and runs that were there before either.
    """
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "site"}
    rows.hold("feed", rows.HOLDER._replace(arguments=f"('{rows.SECRET}',)", renewed=False))
    message, run = rows.leave_dead(), rows.begin(2, params={"given": rows.SECRET})
    step = rows.work_on(run)
    StageStep.objects.filter(pk=step.pk).update(params_text=f'{{"returned": "{rows.SECRET}"}}')
    shown = [*map(root.open, (message, run, step)), root.get(LOCKS)]
    assert all(rows.SECRET in page.text for page in shown)
    settings.DJANGO_CELERY_SAFE |= {"SHOW_ARGUMENTS": False}
    lock = every_page(Lock, "feed")
    pages = [*map(root.open, (run, step)), *map(root.get, (OUTBOX, RUNS, STEPS, *lock.values()))]
    assert {page.status for page in pages} == {200}
    for url, decision, selection in [
        (OUTBOX, "discard", message.pk),
        (RUNS, "abort", run.pk),
        (LOCKS, "release", *shown[-1].selections),
    ]:
        pages += [ask(url, decision, selection) for ask in (root.take, root.confirm)]
        assert pages[-1].messages[0].startswith("1 ")
    assert all(rows.SECRET not in page.html for page in pages)
    assert rows.SECRET not in " ".join(each.change_message for each in LogEntry.objects.all())


# Decisions on a row's page


def test_a_page_offers_what_fits(root: Visitor) -> None:
    """A run that goes on can be aborted, one that stopped resumed; what was sent is final."""
    run = rows.begin(1, 2)
    for status, offered in {
        Status.RUNNING: ["Abort"],
        Status.FAILED: ["Resume"],
        Status.ABORTED: ["Resume"],
        Status.SUCCEEDED: [],
    }.items():
        StageRun.objects.filter(pk=run.pk).update(status=status)
        assert buttons_of(root.open(run)) == offered
    leaving: list[tuple[Any, list[str]]] = [
        (rows.leave, ["Discard"]),
        (rows.leave_failed, ["Retry", "Discard"]),
        (rows.leave_dead, ["Retry", "Discard"]),
        (rows.leave_sent, []),
    ]
    for leave, offered in leaving:
        assert buttons_of(root.open(leave())) == offered


def buttons_of(page: Any) -> list[str]:
    """Return what the buttons beside a row's title say."""
    forms = page.root.find("form", class_="safe-decision")
    return [each.text for form in forms for each in form.find("button")]
