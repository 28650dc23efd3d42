"""manage.py celery_stages: its output, and the runs afterwards."""

import json
from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, Final

import pytest
from celery import current_app, shared_task
from pytest_django import Settings

from django_celery_safe import SafeTask, stages
from django_celery_safe.databases import Now
from django_celery_safe.delivery.header import HEADER, Header
from django_celery_safe.models import StageRun, StageStep
from django_celery_safe.sending.followed import Fault
from django_celery_safe.stages import Status
from django_celery_safe.stages.engine import StepFollower
from django_celery_safe.testing import run_stages
from tests import commands
from tests.admin.rows import work_on
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.routing import runs_in
from tests.servers.databases import registered, sqlite_settings
from tests.stages.tasks import note

NAME: Final = note.name


@pytest.fixture
def shop(mailbox: Mailbox, db_alias: str) -> Iterator[str]:
    """The database with the runs."""
    with runs_in(db_alias):
        yield db_alias


run, listed, refused, _ = commands.of("celery_stages")


def shown(pk: int, *arguments: str) -> dict[str, Any]:
    """Return the run that ``show --json`` shows."""
    row: dict[str, Any] = json.loads(run("show", str(pk), "--json", *arguments))
    return row


def make_older(one: StageRun, age: float) -> None:
    """Let a run have been started so long ago."""
    rows = StageRun.objects.using(one._state.db).filter(pk=one.pk)
    rows.update(created_at=Now() - timedelta(seconds=age))


def begin(*stage_sizes: int) -> StageRun:
    """Start a run of so many stages, with so many steps each; their messages are sent."""
    last = len(stage_sizes)
    plan = [(note, last - number) for number, size in enumerate(stage_sizes) for _ in range(size)]
    return stages.start(plan)


def deliver(step: StageStep) -> None:
    """Run a step in this process."""
    header = Header(task=step.task, step=step.pk, using=step._state.db)
    options = {"headers": {HEADER: header}}
    current_app.tasks[step.task].apply([{}], task_id=step.task_id, throw=True, **options)


def fail(one: StageRun) -> StageStep:
    """Let the first step of a run fail by an error."""
    failing = one.steps.filter(status=Status.WAITING)[0]
    follower = StepFollower(failing.pk, str(one._state.db))
    fault = Fault("ValueError", "no such album")
    assert follower.fail(failing.task_id, lambda: True, fault)
    return failing


# list


@pytest.mark.sql
def test_list_shows_each_run(shop: str) -> None:
    """A run has its ID, status, stage and steps; and if it failed, by which step and why."""
    assert run("list") == "No run.\n"
    first, second = begin(2, 3), begin(1, 1, 1)
    make_older(first, 36_000)
    make_older(second, 18_000)
    deliver(first.steps[0])
    failing = fail(second)
    heading, failed, *reason, running = run("list").splitlines()
    assert heading.split() == ["ID", "STATUS", "STAGE", "STEPS", "AGE", "RUN"]
    assert failed.split() == [str(second.pk), "failed", "1/3", "0/3", "5h", "-"]
    assert " ".join("".join(reason).split()) == f"{failing}: ValueError: no such album"
    assert running.split() == [str(first.pk), "running", "1/2", "1/5", "10h", "-"]


def test_list_as_json(shop: str) -> None:
    """--json has an object for each run, without what tasks were given or returned."""
    labels: dict[str, Any] = {"key": "album:7", "name": "make album 7", "url": "/albums/7/"}
    one = stages.start([(note, 1, {"value": "the-secret"})], {"album": "the-secret"}, **labels)
    make_older(one, 50)
    deliver(one.steps[0])
    other = begin(1)
    assert "the-secret" not in run("list", "--json") + run("show", str(one.pk), "--json")
    first, second = listed()
    counts = dict.fromkeys(("done", "total", "stage", "stages"), 1)
    wanted = {"id": one.pk, **labels, "status": "succeeded", **counts, "reason": ""}
    assert wanted.items() <= second.items()
    assert 50 <= second["duration_s"] <= second["age_s"] < 650
    assert (first["id"], first["status"], first["ended_at"]) == (other.pk, "waiting", None)
    assert run("list", "--state", "succeeded").splitlines()[1].endswith("  make album 7")


# show


@pytest.mark.sql
def test_show(shop: str) -> None:
    """Each stage has its counts; running steps are listed before waiting ones."""
    one = begin(4, 9, 1)
    for step in one.steps[:6]:
        deliver(step)
    step = work_on(one, number=6)
    values, counts, steps = run("show", str(one.pk)).split("\n\n")
    assert "status        running\ndone          6\ntotal         14\nstage         2\n" in values
    assert [line.split()[2:6] for line in counts.splitlines()] == [
        *(["TOTAL", "WAITING", "RUNNING", "SUCCEEDED"], [*"4004"], [*"9612"], [*"1100"])
    ]
    _, running, details, *waiting = steps.splitlines()
    assert running.split()[::2] == ["running", NAME]
    assert details == f"    {step.task_id}, web1 pid 42"
    assert [line.split()[::2] for line in waiting[::2]] == [["waiting", NAME]] * 6


@stages.step
def divide(params: dict[str, Any], by: int) -> None:
    """Fail in a function of another's."""
    Fraction(1, by)


def test_show_of_a_failure(shop: str, settings: Settings) -> None:
    """A failed step comes first, with its duration, its arguments and its traceback's end."""
    task = shared_task(base=SafeTask, name="tests.command.divide")(divide)
    run_stages([(note, 2), (task, 1, {"by": 1}), (task, 1, {"by": 0}), (note, 0)])
    one = StageRun.objects.using(shop).get()
    (row,) = shown(one.pk)["steps"]
    assert row["reason"] == "ZeroDivisionError: Fraction(1, 0)"
    text = run("show", str(one.pk))
    assert f'\n    {row["task_id"]}\n    {{"by": 0}}\n    {row["reason"]}\n' in text
    assert "Fraction(1, by)\n" in text
    settings.DJANGO_CELERY_SAFE = {"SHOW_ARGUMENTS": False}
    assert '"by"' not in run("show", str(one.pk))


def test_show_as_json(shop: str) -> None:
    """--json has the run as in the list, its stages with all counts, and the same steps."""
    one = begin(2, 1)
    step = work_on(one)
    row = shown(one.pk)
    assert [*listed()[0], "by_stage", "steps"] == list(row)
    none = {"succeeded": 0, "failed": 0, "aborted": 0}
    assert row["by_stage"] == [
        {"stage": 1, "priority": 2, "total": 2, "waiting": 1, "running": 1, **none},
        {"stage": 2, "priority": 1, "total": 1, "waiting": 1, "running": 0, **none},
    ]
    found, waiting = row["steps"]
    assert (waiting["status"], waiting["duration_s"], found["waits_s"]) == ("waiting", None, None)
    assert waiting["waits_s"] >= 0 <= found["duration_s"]
    assert 0 < found["remaining_s"] <= 600
    assert (found["task_id"], found["process"]) == (step.task_id, "web1 pid 42")


# resume, abort


def test_resume(shop: str, mailbox: Mailbox) -> None:
    """Failed steps are sent again, succeeded ones are not."""
    one = begin(2, 1)
    deliver(one.steps[0])
    fail(one)
    before = one.steps[1].task_id
    mailbox.take()
    told = f"Run {one.pk} is running now: stage 1 of 2, 1 of 3 steps done.\n"
    assert run("resume", str(one.pk)) == told
    assert mailbox.take_one().id == one.steps[1].task_id != before
    for step in one.steps[1:]:
        deliver(step)
    assert shown(one.pk)["status"] == "succeeded"


def test_abort(shop: str) -> None:
    """Waiting steps are stopped, and running ones go on."""
    one = begin(2, 1)
    work_on(one)
    told = f"Run {one.pk} is aborted now: stage 1 of 2, 0 of 3 steps done.\n"
    assert run("abort", str(one.pk)) == told
    assert [step.status for step in one.steps] == ["running", "aborted", "aborted"]
    assert f"its step {one.steps[0]} still runs" in refused("resume", str(one.pk))[1]


def test_those_that_can_not_be_changed_are_named(shop: str) -> None:
    """Each of several runs is changed if it can be; the others are told of, and the status is 1."""
    goes, done, other = begin(1), begin(1), begin(1)
    deliver(done.steps[0])
    ids = [str(pk) for pk in (goes.pk, done.pk, 99, other.pk, goes.pk)]
    out, why = refused("abort", *ids)
    assert [line.split()[1] for line in out.splitlines()] == [str(goes.pk), str(other.pk)]
    assert why == (
        f"Can't abort run {done.pk}: its status is succeeded. Nothing was changed. There is no "
        f"run 99. `manage.py celery_stages list` shows the IDs."
    )
    for action in ("show", "resume", "abort"):
        assert refused(action, "99")[1].startswith("There is no run 99. ")


@pytest.mark.django_db(databases=["default"])
def test_without_tables(make_database: MakeDatabase, tmp_path: Path) -> None:
    """Each action names what the database says, and migrate."""
    with (
        registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")),
        runs_in("empty"),
    ):
        for action in ("list", "show 1", "resume 1", "abort 1"):
            out, why = refused(*action.split())
            assert (out, "no such table" in why, why.endswith("Was manage.py migrate run?")) == (
                "", True, True,
            )  # fmt: skip
