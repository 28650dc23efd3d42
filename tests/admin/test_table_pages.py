"""The pages of messages, records, runs and steps, in each state."""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final

import pytest
from django.contrib.admin import site
from django.contrib.contenttypes.models import ContentType
from django.db import connections
from django.db.models import Model
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from django_celery_safe.databases import Now
from django_celery_safe.models import IdempotencyRecord, OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import every_page, make_visitor
from tests.admin.pages import Visitor
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


@pytest.fixture
def staff(site: str) -> Visitor:
    """Somebody who may do everything, on each database."""
    return make_visitor(is_superuser=True)


@every_table
def test_an_empty_list(staff: Visitor, model: type[Model]) -> None:
    """A list says what its rows are, and, while it is empty, when there will be some."""
    shown: Any = site._registry[model]
    about, nothing = str(shown.help_text), str(shown.empty_text)
    assert about
    assert nothing
    empty = staff.get(every_page(model, 1)["list"]).content
    assert about in empty
    assert nothing in empty
    MAKERS[model](1)
    filled = staff.get(every_page(model, 1)["list"]).content
    assert about in filled
    assert nothing not in filled


# The outbox


def test_states_of_messages(staff: Visitor) -> None:
    """A message that waits, one that is due, one that failed, a dead and a sent one tell apart."""
    rows.leave(due_at=Now() + timedelta(seconds=90))
    rows.leave(due_at=Now() - timedelta(seconds=90))
    rows.leave_failed("no route to host")
    rows.leave_dead("x" * 999)
    rows.leave_sent()
    shown = staff.get(OUTBOX).rows
    assert [row["State"] for row in shown] == ["pending", "pending", "pending", "dead", "sent"]
    assert [row["Attempts"] for row in shown] == ["0", "0", "1", "1", "0"]
    assert [row["Due"].split()[0] for row in shown] == ["in", "now", "in", "-", "-"]
    assert shown[2]["Error"] == "no route to host"
    assert shown[3]["Error"] == f"{'x' * 99}…"
    assert all(row["Age"].endswith("s") for row in shown)
    assert {row["Task"] for row in shown} == {"tests.app.tasks.add"}


@pytest.mark.parametrize(("state", "count"), [("pending", 2), ("dead", 1), ("sent", 1)])
def test_filter_of_states(staff: Visitor, state: str, count: int) -> None:
    """The list is narrowed to the messages of one state."""
    for make in (rows.leave, rows.leave_failed, rows.leave_dead, rows.leave_sent):
        make()
    assert [row["State"] for row in staff.get(OUTBOX, state=state).rows] == [state] * count
    assert staff.get(OUTBOX, state=state, _facets="True").status == 200


@pytest.mark.parametrize(
    "state", ["erase", "discard", "revive", "delete", "settle", "x", "__str__"]
)
def test_filter_calls_nothing_else(root: Visitor, state: str) -> None:
    """A state that is none changes nothing, whatever method of the table has its name."""
    rows.leave_dead()
    before = list(OutboxMessage.objects.values())
    page = root.get(OUTBOX, state=state)
    assert (page.status, page.response["Location"]) == (302, f"{OUTBOX}?e=1")
    root.take(f"{OUTBOX}?state={state}", "discard", before[0]["id"], confirmed="1")
    assert list(OutboxMessage.objects.values()) == before


def test_page_of_a_message(staff: Visitor) -> None:
    """A message's page shows its arguments and the whole of its error."""
    row = rows.leave_dead("x" * 999)
    fields = staff.get(every_page(OutboxMessage, row.pk)["change"]).fields
    assert fields["Task"] == "tests.app.tasks.add"
    assert fields["Task id"] == row.task_id
    assert fields["Arguments"] == f"('{rows.SECRET}',)"
    assert (fields["State"], fields["Attempts"], fields["Error"]) == ("dead", "1", "x" * 999)
    assert (fields["Due at"], fields["Sent at"]) == ("-", "-")
    assert fields["Dead at"] != "-"


def test_message_changed_by_hand(staff: Visitor) -> None:
    """A message that makes no sense any more is shown all the same, without arguments."""
    deep = "[" * 10_000
    for properties in ("", "null", "{", '{"options": []}', '{"options": {"headers": 7}}', deep):
        row = rows.leave(properties=properties)
        page = staff.get(every_page(OutboxMessage, row.pk)["change"])
        assert (page.status, page.fields["Arguments"]) == (200, "-")


def test_arguments_of_any_text(staff: Visitor) -> None:
    """Arguments of half a character, or that steer a terminal, are shown as escapes."""
    row = rows.leave(
        properties='{"options": {"headers": {"argsrepr": "(\\ud800 \\u202e)", "kwargsrepr": "{}"}}}'
    )
    page = staff.get(every_page(OutboxMessage, row.pk)["change"])
    assert page.fields["Arguments"] == "(\\ud800 \\u202e)"


def test_search_of_messages(staff: Visitor) -> None:
    """A message is found by the beginning of its task's name, or its whole task ID."""
    row = rows.leave()
    for query, found in [("tests.app", 1), (row.task_id, 1), ("app.tasks", 0), ("%", 0)]:
        assert len(staff.get(OUTBOX, q=query).rows) == found
    assert "Null characters are not allowed." in staff.get(OUTBOX, q="\x00").messages


@pytest.mark.parametrize(
    ("url", "lookup"),
    [
        (OUTBOX, "properties__contains"),
        (OUTBOX, "body__isnull"),
        (RECORDS, "result__contains"),
        (RUNS, "params_text__contains"),
        (STEPS, "arguments_text__contains"),
        (STEPS, "run__params_text__contains"),
    ],
)
def test_what_is_not_shown_is_not_guessed(root: Visitor, url: str, lookup: str) -> None:
    """No URL narrows a list by a column that it does not show."""
    assert root.get(url, **{lookup: "a"}).status == 400


# Records


def test_states_of_records(staff: Visitor) -> None:
    """A record that is worked on, one whose process is gone, a done and a failed one tell apart."""
    rows.record("busy", "running", rows.LEASE)
    rows.record("gone", "running", rows.OVER)
    rows.record("done", "done", result='{"charge": 7}')
    rows.record("failed", "failed", error="declined")
    shown = {row["Key"]: row for row in staff.get(RECORDS).rows}
    assert {key: row["State"] for key, row in shown.items()} == {
        "busy": "running",
        "gone": "running, its process is gone",
        "done": "done",
        "failed": "failed",
    }
    assert all(row["Claimed"].startswith(("9", "2min")) for row in shown.values())
    assert shown["busy"]["Task"] == "shop.tasks.sell"

    def fields(key: str) -> dict[str, str]:
        return staff.get(every_page(IdempotencyRecord, key)["change"]).fields

    busy = fields("busy")
    assert (busy["Process"], busy["Task id"]) == ("pid 42 on web1", "id-1")
    assert busy["Lease left"] == "10min"
    assert fields("gone")["Lease left"] == "0.0s"
    assert fields("done")["Lease left"] == "-"
    assert fields("done")["Result"] == '{"charge": 7}'
    assert fields("failed")["Error"] == "declined"


def test_a_record_outside_tasks(staff: Visitor) -> None:
    """A record that no task claimed shows no task, and one of nobody known says that."""
    rows.record("code", holder=rows.HOLDER._replace(task=None, task_id=None))
    rows.record("odd", holder=rows.HOLDER._replace(host="", task=None, task_id=None))
    fields = staff.get(every_page(IdempotencyRecord, "code")["change"]).fields
    assert (fields["Task"], fields["Task id"], fields["Process"]) == ("-", "-", "pid 42 on web1")
    fields = staff.get(every_page(IdempotencyRecord, "odd")["change"]).fields
    assert fields["Process"] == "not known"


@pytest.mark.parametrize(
    ("site", "name"),
    [
        *(pytest.param("sqlite", name, id=f"sqlite-{kind}") for kind, name in NAMES.items()),
        *(
            pytest.param("postgres", NAMES[kind], id=f"postgres-{kind}", marks=pytest.mark.long)
            for kind in ("control", "half", "long", "wide")
        ),
    ],
    indirect=["site"],
)
def test_keys(site: str, name: str) -> None:
    """A record of any key is listed with the whole key, shown, asked about and forgotten."""
    staff = make_visitor(is_superuser=True)
    row = rows.record(
        name, holder=rows.HOLDER._replace(task=name, task_id=name, host=name, arguments=name)
    )
    page = staff.get(RECORDS)
    assert [shown["Key"] for shown in page.rows] == [key_of(name)]
    pages = every_page(IdempotencyRecord, row.pk)
    assert pages["change"] in page.links
    fields = staff.get(pages["change"]).fields
    assert fields["Key"] == key_of(name)
    assert key_of(name) in fields["Process"]
    asked = staff.take(RECORDS, "forget", row.pk)
    assert key_of(name) in asked.content
    assert asked.find_inline() == []
    told = staff.confirm(RECORDS, "forget", *asked.selections)
    assert told.messages == ["1 idempotency record was forgotten."]
    assert not IdempotencyRecord.objects.exists()


def test_search_of_records(staff: Visitor) -> None:
    """A record is found by a key's beginning, also where it is hashed, and by its task's id."""
    rows.record(f"paid:{'7' * 300}")
    for query in ("paid:7", "id-1", "shop.tasks.sell"):
        assert len(staff.get(RECORDS, q=query).rows) == 1
    assert staff.get(RECORDS, q="sold").rows == []
    rows.record("mail:Zoë 周")
    for query in ("Zoë", "周", "mail:Zoë", "ZO"):
        assert len(staff.get(RECORDS, q=query).rows) == 1
    assert staff.get(RECORDS, q="Zoé").rows == []


# Runs and steps


def test_states_of_runs(staff: Visitor) -> None:
    """A run that waits, one that runs, a failed, an aborted and one that succeeded tell apart."""
    rows.begin(1, 2)
    rows.work_on(rows.begin(1, 2))
    rows.end(rows.begin(1, 2), Status.FAILED)
    rows.end(rows.begin(1), Status.ABORTED, error="stopped by hand")
    run = rows.begin(1)
    StageStep.objects.filter(run=run).update(status=Status.SUCCEEDED)
    rows.end(run, Status.SUCCEEDED)
    page = staff.get(RUNS)
    shown = list(reversed(page.rows))
    for level, states in {"safe-bad": ["Failed"], "safe-good": ["Succeeded"]}.items():
        assert [state.text for state in page.root.find("span", class_=level)] == states
    assert [row["Status"] for row in shown] == [
        "Waiting", "Running", "Failed", "Aborted", "Succeeded",
    ]  # fmt: skip
    assert [row["Progress"] for row in shown] == ["0/3", "0/3", "0/3", "0/1", "1/1"]
    assert [row["Stage"] for row in shown] == ["1 of 2", "1 of 2", "1 of 2", "1 of 1", "1 of 1"]
    assert [row["Error"] for row in shown] == [
        "-", "-", "ValueError: it does not work", "stopped by hand", "-",
    ]  # fmt: skip
    assert all(re.fullmatch(r"\d+\.\ds", row["Duration"]) for row in shown)
    for status in Status.values:
        assert len(staff.get(RUNS, status__exact=status, _facets="True").rows) == 1


def test_page_of_a_run(staff: Visitor) -> None:
    """A run's page shows its stages with their progress, and leads to its steps alone."""
    run = rows.begin(2, 3, params={"album": 7})
    first, *_ = run.steps
    StageStep.objects.filter(pk=first.pk).update(status=Status.SUCCEEDED)
    rows.begin(1)
    page = staff.get(every_page(StageRun, run.pk)["change"])
    (table,) = page.root.find("table", class_="safe-stages")
    assert [line.text for line in table.find("tr")] == [
        "Stage Priority Progress Steps",
        "1 0 1/2 1 succeeded, 1 waiting",
        "2 -1 0/3 3 waiting",
    ]
    bars = [(bar.attributes["max"], bar.attributes["value"]) for bar in table.find("progress")]
    assert bars == [("2", "1"), ("3", "0")]
    assert page.fields["Params"] == '{"album": 7}'
    (steps,) = {link for link in page.links if link.startswith(f"{STEPS}?")}
    assert [row["1 Run"] for row in staff.get(steps).rows] == [f"Run {run.pk}"] * 5
    assert {link for link in page.links if link.endswith("/change/")} == {
        every_page(StageStep, step.pk)["change"] for step in run.steps
    }


def test_a_run_with_a_name(staff: Visitor) -> None:
    """It is listed by its name, found by a part of it or of its key, and leads to its object."""
    labels = {"key": "album:7", "name": "Make <Ann's> album", "url": "/albums/7/?a=1&b=2"}
    run = rows.begin(1, **labels)
    rows.begin(1, key="feed:1")
    title = f"Run {run.pk} (Make <Ann's> album)"
    for text in ("Ann", "bum:7", "ann", "ALBUM:7"):
        assert [row["Run"] for row in staff.get(RUNS, q=text).rows] == [title]
    assert staff.get(RUNS, q="bob").rows == []
    page = staff.get(every_page(StageRun, run.pk)["change"])
    assert labels["url"] in page.links
    assert page.fields["Key"] == "album:7"
    (step,) = run.steps
    assert staff.get(STEPS, q="Make").rows == staff.get(STEPS, q="album:7").rows
    (row,) = staff.get(STEPS, q="album:7").rows
    assert row["1 Run"] == title
    assert staff.get(every_page(StageStep, step.pk)["change"]).fields["Run"] == title


def test_steps_of_a_failed_run(staff: Visitor) -> None:
    """The run's page has the failed step first, with its arguments; the step's the traceback."""
    run = rows.end(rows.begin(1, 2), Status.FAILED)
    *_, failing = run.steps
    run.steps.filter(pk=failing.pk).update(started_at=run.created_at)
    run.steps.filter(pk=failing.pk).fail("ValueError", "no <album>", 'File "a.py"\n  raise <x>\nV')
    run.steps.exclude(pk=failing.pk).update(status=Status.ABORTED)
    page = staff.get(every_page(StageRun, run.pk)["change"])
    (table,) = page.root.find("table", class_="safe-steps")
    first, error = [line.text for line in table.find("tr")[1:3]]
    assert first.startswith(f'{failing.task} {{"name": "{rows.SECRET}"}} 2 failed ')
    assert error == "ValueError: no <album>"
    fields = staff.get(every_page(StageStep, failing.pk)["change"]).fields
    assert fields["Traceback"].split() == ["File", '"a.py"', "raise", "<x>", "V"]
    assert fields["Duration"] != "-"
    assert fields["Waiting since"] == "-"


def test_a_step_that_waits(staff: Visitor) -> None:
    """It says since when, and at once if the project has no such task."""
    run = rows.begin(1, 1)
    first, later = run.steps
    run.steps.update(task="shop.tasks.renamed")
    page = staff.get(every_page(StageRun, run.pk)["change"])
    (table,) = page.root.find("table", class_="safe-steps")
    texts = [line.text for line in table.find("tr")]
    assert "1 waiting since 2" in texts[1]
    assert "NotRegistered: This project has no task of this name" in texts[2]
    assert "since" not in texts[3]
    fields = staff.get(every_page(StageStep, first.pk)["change"]).fields
    assert fields["Waiting since"].startswith("2")
    fields = staff.get(every_page(StageStep, later.pk)["change"]).fields
    assert (fields["Waiting since"], fields["Error"]) == ("-", "-")


def test_tasks_that_can_not_be_loaded(staff: Visitor, caplog: pytest.LogCaptureFixture) -> None:
    """A page of a run shows its steps also while a module with tasks of the project is broken."""
    run = rows.begin(1)
    run.steps.update(task="shop.tasks.renamed")
    with app_without_tasks("memory://") as app:
        app.conf.include = ["no_such_module_of_tasks"]
        page = staff.get(every_page(StageRun, run.pk)["change"])
    assert "shop.tasks.renamed" in page.content
    assert "NotRegistered" not in page.content
    assert "The project's tasks can't be loaded: ModuleNotFoundError" in caplog.text


def test_states_of_steps(staff: Visitor) -> None:
    """A step that runs, one whose process is gone and one that failed tell apart."""
    busy = rows.work_on(rows.begin(1))
    gone = rows.work_on(rows.begin(1), rows.OVER)
    failed = rows.end(rows.begin(1), Status.FAILED)
    page = staff.get(STEPS)
    shown = page.rows
    assert [row["Status"] for row in shown] == ["Running", "Running", "Failed"]
    assert [state.text for state in page.root.find("span", class_="safe-bad")] == ["Failed"]
    assert [row["Process"] for row in shown] == ["pid 42 on web1", "pid 42 on web1, gone", "-"]
    fields = staff.get(every_page(StageStep, busy.pk)["change"]).fields
    assert fields["Lease left"] == "10min"
    assert fields["Arguments"] == f'{{"name": "{rows.SECRET}"}}'
    assert fields["Returned"] == "-"
    fields = staff.get(every_page(StageStep, gone.pk)["change"]).fields
    assert fields["Lease left"] == "0.0s"
    step = failed.error_step
    assert step is not None
    fields = staff.get(every_page(StageStep, step.pk)["change"]).fields
    assert fields["Error"] == "ValueError: it does not work"


def test_a_run_without_steps(staff: Visitor) -> None:
    """A run of no steps is shown as done."""
    run = rows.end(rows.begin(1), Status.SUCCEEDED)
    StageStep.objects.filter(run=run).delete()
    assert staff.get(RUNS).rows[0]["Progress"] == "0/0"
    assert staff.get(every_page(StageRun, run.pk)["change"]).status == 200


def test_holders_of_any_text(staff: Visitor) -> None:
    """A step's process on a host of any name is shown."""
    holder = rows.HOLDER._replace(host="\ud800\x1b")
    step = rows.work_on(rows.begin(1), holder=holder)
    assert staff.get(STEPS).rows[0]["Process"] == "pid 42 on \\ud800\\x1b"
    assert staff.get(every_page(StageStep, step.pk)["change"]).status == 200


def test_garbled_holders(staff: Visitor) -> None:
    """A holder that makes no sense is nobody known."""
    record, step = rows.record("k", "running"), rows.work_on(rows.begin(1))
    for text in ("", "[]", "{", "[" * 10_000):
        IdempotencyRecord.objects.update(holder=text)
        StageStep.objects.update(holder=text)
        assert staff.get(STEPS).rows[0]["Process"].startswith("not known")
        assert staff.get(every_page(StageStep, step.pk)["change"]).status == 200
        page = staff.get(every_page(IdempotencyRecord, record.pk)["change"])
        assert page.fields["Process"] == "not known"


# All of them


@every_table
def test_no_rows(staff: Visitor, model: type[Model]) -> None:
    """An empty table has an empty list."""
    page = staff.get(every_page(model, 1)["list"])
    assert (page.status, page.rows) == (200, [])


@every_table
def test_no_such_row(site: str, model: type[Model]) -> None:
    """The page of a row that is gone, or that never can be, leads back to the start."""
    staff = make_visitor(is_superuser=True)
    for pk in ("99", "x", "\x00", "9" * 30, "-1"):
        for name in ("change", "history"):
            page = staff.get(every_page(model, pk)[name])
            assert (page.status, page.response["Location"]) == (302, "/admin/")


def count_queries(visitor: Visitor, url: str) -> int:
    """Return how many queries a page needs, the session's and the user's included."""
    for model in MAKERS:  # Django asks for these once in each process
        ContentType.objects.get_for_model(model, for_concrete_model=False)
    with CaptureQueriesContext(connections["site"]) as queries:
        assert visitor.get(url).status == 200
    return len(queries)


@every_table
def test_queries(root: Visitor, model: type[Model]) -> None:
    """Lists and pages of many rows need no query more than those of a single one."""
    make = MAKERS[model]
    pages = every_page(model, make(0).pk)
    before = {name: count_queries(root, url) for name, url in pages.items()}
    for number in range(1, 15):
        make(number)
    assert {name: count_queries(root, url) for name, url in pages.items()} == before
    assert before["list"] <= 6
    assert before["change"] <= 8


@every_table
def test_queries_of_a_decision(root: Visitor, model: type[Model]) -> None:
    """The page that asks needs no query for each of the rows that it shows."""
    make = MAKERS[model]
    selected = [make(0).pk]
    url = every_page(model, 0)["list"]
    for decision in root.get(url).decisions:
        with CaptureQueriesContext(connections["site"]) as of_one:
            root.take(url, decision, *selected[:1])
        while len(selected) < 15:
            selected.append(make(len(selected)).pk)
        with CaptureQueriesContext(connections["site"]) as of_many:
            assert len(root.take(url, decision, *selected).selections) == 15
        assert len(of_many) == len(of_one)


def test_a_run_of_many_steps(root: Visitor) -> None:
    """A run's page needs no query for each of its steps."""
    small, large = rows.begin(1, 1), rows.begin(*[10] * 10)
    few = count_queries(root, every_page(StageRun, small.pk)["change"])
    assert count_queries(root, every_page(StageRun, large.pk)["change"]) == few


def test_what_a_list_reads(root: Visitor) -> None:
    """Lists do not read the arguments and bodies of messages, which may be large."""
    rows.leave()
    with CaptureQueriesContext(connections["site"]) as queries:
        root.get(OUTBOX)
    assert not any('"body"' in query["sql"] for query in queries)


def test_arguments_hidden(root: Visitor, settings: Settings) -> None:
    """Without SHOW_ARGUMENTS no page shows arguments or params, nor what asks for a decision."""
    message, run = rows.leave_dead(), rows.begin(2, params={"given": rows.SECRET})
    step = rows.work_on(run)
    StageStep.objects.filter(pk=step.pk).update(params_text=f'{{"returned": "{rows.SECRET}"}}')
    shown = [
        every_page(OutboxMessage, message.pk)["change"],
        every_page(StageRun, run.pk)["change"],
        every_page(StageStep, step.pk)["change"],
    ]
    assert all(rows.SECRET in root.get(url).text for url in shown)
    settings.DJANGO_CELERY_SAFE = {"SHOW_ARGUMENTS": False}
    taken = [
        root.take(OUTBOX, "discard", message.pk),
        root.confirm(OUTBOX, "discard", message.pk),
        root.take(RUNS, "abort", run.pk),
        root.confirm(RUNS, "abort", run.pk),
    ]
    pages: list[Any] = [root.get(url) for url in [*shown[1:], OUTBOX, RUNS, STEPS]]
    assert not OutboxMessage.objects.filter(pk=message.pk).exists()
    assert [page.status for page in pages] == [200] * 5
    assert all(rows.SECRET not in page.html for page in taken + pages)


# Decisions on a row's page


@pytest.mark.parametrize(
    ("status", "offered"),
    [
        (Status.RUNNING, ["Abort"]),
        (Status.FAILED, ["Resume"]),
        (Status.ABORTED, ["Resume"]),
        (Status.SUCCEEDED, []),
    ],
)
def test_a_run_offers_what_fits(root: Visitor, status: Status, offered: list[str]) -> None:
    """A run that goes on can be aborted, one that stopped resumed, one that is done neither."""
    run = rows.begin(1, 2)
    StageRun.objects.filter(pk=run.pk).update(status=status)
    assert buttons_of(root.get(f"{RUNS}{run.pk}/change/")) == offered


@pytest.mark.parametrize(
    ("leave", "offered"),
    [
        (rows.leave, ["Discard"]),
        (rows.leave_failed, ["Retry", "Discard"]),
        (rows.leave_dead, ["Retry", "Discard"]),
        (rows.leave_sent, []),
    ],
)
def test_a_message_offers_what_fits(
    root: Visitor, leave: Callable[[], OutboxMessage], offered: list[str]
) -> None:
    """Only what failed can be retried, and what was sent not be discarded."""
    row = leave()
    assert buttons_of(root.get(f"{OUTBOX}{row.pk}/change/")) == offered


def buttons_of(page: Any) -> list[str]:
    """Return what the buttons beside a row's title say."""
    forms = page.root.find("form", class_="safe-decision")
    return [each.text for form in forms for each in form.find("button")]
