"""manage.py celery_stages: its output, and the runs afterwards."""

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from celery import shared_task
from django.db import connections, transaction
from pytest_django import Settings

from django_celery_safe import SafeTask, stages
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from django_celery_safe.signals import run_ended
from django_celery_safe.stages import Status
from django_celery_safe.testing import run_stages
from tests import commands
from tests.conftest import MakeDatabase
from tests.routing import runs_in
from tests.sending.conftest import hearing
from tests.servers.databases import DatabaseKind, registered, sqlite_settings
from tests.stages.tasks import add, note
from tests.stages.test_sweep import (
    Queue,
    at,
    begin,
    claim,
    deliver,
    ended,
    leave_silent,
    leave_stuck,
    leave_unbegun,
    poison,
    queue,
    wait_since,
)

__all__ = ["queue"]

NAME: Final = note.name

pytestmark = pytest.mark.usefixtures("queue")


@pytest.fixture
def shop(make_database: MakeDatabase, db_kind: DatabaseKind) -> Iterator[str]:
    """The database with the runs."""
    alias = make_database(db_kind, "shop")
    with runs_in(alias):
        yield alias


run = partial(commands.run_in_80_columns, "celery_stages")
listed = partial(commands.listed, "celery_stages")
refused = partial(commands.refused, "celery_stages")


def shown(pk: int, *arguments: str) -> dict[str, Any]:
    """Return the run that ``show --json`` shows."""
    row: dict[str, Any] = json.loads(run("show", str(pk), "--json", *arguments))
    return row


def make_older(one: StageRun, age: float) -> None:
    """Let a run have been started so long ago."""
    rows = StageRun.objects.using(one._state.db).filter(pk=one.pk)
    rows.update(created_at=Now() - timedelta(seconds=age))


def fail(one: StageRun) -> StageStep:
    """Let the first step of a run fail by an error."""
    failing = one.steps.filter(status=Status.WAITING)[0]
    poison(failing)
    values = {"error_type": "ValueError", "error": "no such album", "note": "", "traceback": ""}
    at(failing).update(**values)
    return failing


# list


@pytest.mark.sql
def test_list_shows_each_run(shop: str) -> None:
    """A run has its id, state, stage and steps; and if it failed, by which step and why."""
    assert run("list") == "There is no run.\n"
    first, second = begin(2, 3), begin(1, 1, 1)
    make_older(first, 36_000)
    deliver(first.steps[0])
    failing = fail(second)
    lines = run("list").splitlines()
    assert lines[0] == f"Run {second.pk}: failed, stage 1 of 3, 0 of 3 steps done (0 %)"
    assert re.match(r"    started \S+ ago, ended \S+ ago, took \d+\.\ds$", lines[1])
    assert " ".join("".join(lines[2:4]).split()) == f"{failing} failed: ValueError: no such album"
    assert lines[4:] == [
        f"Run {first.pk}: running, stage 1 of 2, 1 of 5 steps done (20 %)",
        "    started 10h ago",
    ]


def test_list_as_json(shop: str) -> None:
    """--json has an object for each run, without what tasks were given or returned."""
    labels: dict[str, Any] = {"key": "album:7", "name": "make album 7", "url": "/albums/7/"}
    one = stages.start([(note, 1, {"value": "the-secret"})], {"album": "the-secret"}, **labels)
    make_older(one, 50)
    deliver(one.steps[0])
    other = begin(1)
    assert "the-secret" not in run("list", "--json") + run("show", str(one.pk), "--json")
    first, second = listed()
    wanted = {
        "id": one.pk,
        **labels,
        "database": "shop",
        "status": "succeeded",
        **dict.fromkeys(("done", "total", "stage", "stages"), 1),
        "percent": 100,
        "error_step": None,
        "error": "",
    }
    assert wanted.items() <= second.items()
    assert 50 <= second["duration_s"] <= second["age_s"] < 650
    assert 0 <= second["ended_s"] < 600
    assert (first["id"], first["status"], first["ended_s"]) == (other.pk, "waiting", None)


def test_list_of_some(shop: str) -> None:
    """Runs are chosen by state, by a part of their name or key, and by a step's task."""
    other = stages.start([(add, 1)], key="album:71")
    one = stages.start([(note, 1), (note, 1)], key="album:7", name="Make Ann's album")
    deliver(one.steps[0])
    for choice, runs in (
        (["--state", "running"], [one]),
        (["--search", "ANN"], [one]),
        (["--search", "ALBUM:7"], [one, other]),
        (["--task", add.name, "--state", "waiting"], [other]),
    ):
        assert [row["id"] for row in listed(*choice)] == [run.pk for run in runs]
    assert run("list", "--search", "bob") == run("list", "--task", "no") == "No such run.\n"
    text = run("list", "--search", "ann")
    assert text.startswith(f"Run {one.pk} (Make Ann's album): running, stage 1 of 1, ")
    assert text.splitlines()[1] == "    album:7"


# show


@pytest.mark.sql
def test_show(shop: str) -> None:
    """A stage's bar is full when all is done; running steps are listed before waiting ones."""
    one = begin(4, 9, 1)
    for step in one.steps[:6]:
        deliver(step)
    claim(one.steps[6], pid=43)
    step = one.steps[6]
    text = run("show", str(one.pk))
    assert text.startswith(f"Run {one.pk}: running, stage 2 of 3, 6 of 14 steps done (42 %)\n")
    parts = text.split("\n\n")
    assert parts[1].splitlines() == [
        "Stage 1  [####################]  4/4",
        "Stage 2  [####................]  2/9  1 running",
        "Stage 3  [....................]  0/1",
    ]
    head, details, *waiting = parts[2].splitlines()
    assert waiting[::2] == [f"waiting   {NAME}"] * 6
    assert head == f"running   {NAME}"
    assert details.startswith(f"    stage 2, {step.task_id}, for ")
    assert details.endswith("pid 43 on web1")
    text = run("show", str(one.pk), "--limit", "2")
    assert text.endswith("\nThere are more steps: --limit is 2.\n")
    assert len(shown(one.pk, "--limit", "2")["steps"]) == 2
    assert len(shown(one.pk, "--limit", "0")["steps"]) == 7


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
    assert row["error"] == "ZeroDivisionError: Fraction(1, 0)"
    assert row["traceback"].splitlines()[-1] == row["error"]
    text = run("show", str(one.pk))
    assert "Stage 2  [##########..........]  1/2  1 failed\n" in text
    assert "Stage 3  [....................]  0/1  1 aborted\n" in text
    assert re.search(rf"stage 2, {row['task_id']}, took \d+\.\ds\n    \{{\"by\": 0\}}\n", text)
    assert "Fraction(1, by)\n" in text
    assert text.count(row["error"]) == 2  # once of the run
    settings.DJANGO_CELERY_SAFE = {"SHOW_ARGUMENTS": False}
    assert '"by"' not in run("show", str(one.pk))


def test_show_as_json(shop: str) -> None:
    """--json has the run as in the list, its stages with all counts, and the same steps."""
    one = begin(2, 1)
    step = one.steps[0]
    claim(step)
    row = shown(one.pk)
    assert [*listed()[0], "by_stage", "steps"] == list(row)
    none = {"succeeded": 0, "failed": 0, "aborted": 0}
    assert row["by_stage"] == [
        {"stage": 1, "priority": 2, "total": 2, "waiting": 1, "running": 1, **none},
        {"stage": 2, "priority": 1, "total": 1, "waiting": 1, "running": 0, **none},
    ]
    found, waiting = row["steps"]
    assert (waiting["status"], waiting["duration_s"]) == ("waiting", None)
    assert found["duration_s"] >= 0
    assert 0 < found["remaining_s"] <= 600
    assert (found["task"], found["task_id"], found["status"]) == (NAME, step.task_id, "running")
    assert (found["host"], found["pid"], found["starts"]) == ("web1", 42, 1)


# resume, abort


def test_resume(shop: str, queue: Queue) -> None:
    """Failed steps are sent again, succeeded ones are not; a --dry-run leaves nothing behind."""
    one = begin(2, 1)
    deliver(one.steps[0])
    fail(one)
    before = one.steps[1].task_id
    told = f"Run {one.pk} would go on: stage 1 of 2, 1 of 3 steps done (33 %).\n"
    sent = len(queue())
    assert run("resume", str(one.pk), "--dry-run") == told
    with transaction.atomic(using=shop):
        assert connections[shop].run_on_commit == []
    assert (shown(one.pk)["status"], one.steps[1].task_id, len(queue())) == ("failed", before, sent)
    assert OutboxMessage.objects.using(shop).count() == 0
    assert run("resume", str(one.pk)) == told.replace("would go on", "goes on")
    assert queue()[sent:] == [one.steps[1].task_id] != [before]
    for step in one.steps[1:]:
        deliver(step)
    assert shown(one.pk)["status"] == "succeeded"


def test_abort(shop: str) -> None:
    """Waiting steps are stopped, running ones counted, and --dry-run only says so."""
    one = begin(2, 1)
    claim(one.steps[0])
    told = f"Run {one.pk} would be aborted: stage 1 of 2, 0 of 3 steps done (0 %), 1 still running."
    with hearing(run_ended) as heard:
        assert run("abort", str(one.pk), "--dry-run") == f"{told}\n"
        assert (shown(one.pk)["status"], heard) == ("running", [])
        assert run("abort", str(one.pk)) == f"{told.replace('would be', 'was')}\n"
    assert [said["status"] for said in heard] == ["aborted"]
    assert [step.status for step in one.steps] == ["running", "aborted", "aborted"]
    assert f"its step {one.steps[0]} still runs" in refused("resume", str(one.pk))[1]


def test_those_that_can_not_be_changed_are_named(shop: str) -> None:
    """Each of several runs is changed if it can be; the others are told of, and the status is 1."""
    goes, done, other = begin(1), ended(timedelta(), alias=shop), begin(1)
    ids = [str(pk) for pk in (goes.pk, done.pk, 99, other.pk, goes.pk)]
    for arguments in (["--dry-run"], []):
        out, why = refused("abort", *ids, *arguments)
        assert [line.split()[1] for line in out.splitlines()] == [str(goes.pk), str(other.pk)]
        assert why == (
            f"Can't abort run {done.pk}: it has succeeded. Nothing was changed. There is no run "
            f"99. `manage.py celery_stages list` shows the IDs."
        )
    for action in ("show", "resume", "abort"):
        assert refused(action, "99")[1].startswith("There is no run 99. ")
        assert "'1.5' is not a whole number" in refused(action, "1.5")[1]


# sweep, prune


def test_sweep_prints_each_repair(shop: str, queue: Queue) -> None:
    """A repair has its run, its step and the reason; --unstarted-after chooses the patience."""
    dead, lost, stuck = leave_silent(begin(1)), leave_unbegun(begin(1)), leave_stuck(begin(1, 1))
    told = [
        f"Run {dead.run_id}, {dead}: its process died (process 42 on web1), and it was sent again.",
        f"Run {lost.run_id}, {lost}: no worker began it for long, so it was sent again.",
        f"Run {stuck.run_id}: its stage was complete, and it did not go on; now it did.",
        "3 repair(s).",
    ]
    assert run("sweep").split() == " ".join(told).split()
    assert len(queue()) == 3 + 3
    wait_since(begin(1), timedelta(seconds=270))
    assert run("sweep") == run("sweep", "--unstarted-after", "1h") == "0 repair(s).\n"
    assert run("sweep", "--unstarted-after", "4m").endswith("1 repair(s).\n")


def test_prune(shop: str, settings: Settings) -> None:
    """Runs that ended a retention ago go; --dry-run only counts, --older-than chooses."""
    for days in (1, 8):
        ended(timedelta(days=days), alias=shop)
    begin(1)
    assert run("prune", "--dry-run") == "1 run(s) would be deleted.\n"
    assert run("prune") == "1 run(s) were deleted.\n"
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"runs": "a week"}}
    assert "RETENTION['runs']='a week'" in refused("prune")[1]
    assert run("prune", "--older-than", "12h") == "1 run(s) were deleted.\n"
    assert [row["status"] for row in listed()] == ["waiting"]


# Databases


def test_several_databases(shop: str, make_database: MakeDatabase, tmp_path: Path) -> None:
    """The list goes through all that are named; an id needs one; one without tables is named."""
    begin(1)
    with runs_in(make_database("sqlite-immediate", "other")):
        there = [begin(1), begin(1)][-1]
    both = ["--database", "shop", "--database", "other"]
    assert [row["database"] for row in listed()] == ["shop"]
    assert [row["database"] for row in listed(*both)] == ["shop", "other", "other"]
    assert "shop and other have IDs of their own" in refused("show", "1", *both)[1]
    assert run("--database", "other", "abort", str(there.pk)).startswith(f"Run {there.pk} was ")
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        for action in ("list", "show 1", "resume 1", "abort 1", "sweep", "prune"):
            out, why = refused(*action.split(), "--database", "empty")
            assert (out, "has no table for runs of stages (" in why) == ("", True)
            assert why.endswith("). Run manage.py migrate --database=empty.")
