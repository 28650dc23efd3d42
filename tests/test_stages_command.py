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
from django_celery_safe.management.commands import celery_stages
from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from django_celery_safe.signals import run_ended, stage_started
from django_celery_safe.stages import Status
from django_celery_safe.testing import run_stages
from tests import commands
from tests.conftest import MakeDatabase
from tests.docs.pages import names_in, page
from tests.docs.test_docs import own_arguments
from tests.routing import runs_in
from tests.sending.conftest import hearing
from tests.servers.databases import gone_settings, registered, sqlite_settings
from tests.stages.tasks import add, note
from tests.stages.test_sweep import (
    LONG,
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
    shop,
    wait_since,
)

__all__ = ["queue", "shop"]

ROOT: Final = Path(__file__).resolve().parent.parent
COMMANDS: Final = "docs/reference/commands.md"
ACTIONS: Final = (
    "list",
    "show 1",
    "resume 1",
    "abort 1",
    "sweep",
    "prune",
    "prune --older-than 7d --dry-run",
)
NAME: Final = note.name


@pytest.fixture
def lite(make_database: MakeDatabase, queue: Queue) -> Iterator[str]:
    """A SQLite with the runs, where the database makes no difference."""
    alias = make_database("sqlite-immediate", "shop")
    with runs_in(alias):
        yield alias


run = partial(commands.run_in_80_columns, "celery_stages")
listed = partial(commands.listed, "celery_stages")
refused = partial(commands.refused, "celery_stages")
status_of_program = partial(commands.status_of_program, "celery_stages")


def shown(pk: int, *arguments: str) -> dict[str, Any]:
    """Return the run that ``show --json`` shows."""
    row: dict[str, Any] = json.loads(run("show", str(pk), "--json", *arguments))
    return row


def make_older(one: StageRun, age: float) -> None:
    """Let a run have been started so long ago."""
    rows = StageRun.objects.using(one._state.db).filter(pk=one.pk)
    rows.update(created_at=Now() - timedelta(seconds=age))


def fail(one: StageRun, error: str = "no such album") -> StageStep:
    """Let the first step of a run fail by an error."""
    failing = one.steps.filter(status=Status.WAITING)[0]
    poison(failing)
    at(failing).update(error_type="ValueError", error=error, note="", traceback="")
    return failing


# list


def test_list_without_runs(shop: str) -> None:
    """An empty table says so; JSON is an empty list; a choice that meets nothing says that."""
    assert run("list") == "There is no run.\n"
    assert listed() == []
    assert run("list", "--state", "failed") == "No such run.\n"


def test_list_shows_each_run(shop: str, queue: Queue) -> None:
    """A run has its id, state, stage and steps; and if it failed, by which step and why."""
    first, second = begin(2, 3), begin(1, 1, 1)
    make_older(first, 600)
    deliver(first.steps[0])
    failing = fail(second)
    lines = run("list").splitlines()
    assert lines[0] == f"Run {second.pk}: failed, stage 1 of 3, 0 of 3 steps done (0 %)"
    assert re.match(r"    started \S+ ago, ended \S+ ago, took \d+\.\ds$", lines[1])
    assert " ".join("".join(lines[2:4]).split()) == f"{failing} failed: ValueError: no such album"
    assert lines[4:] == [
        f"Run {first.pk}: running, stage 1 of 2, 1 of 5 steps done (20 %)",
        "    started 10min ago",
    ]


def test_list_as_json(lite: str) -> None:
    """--json has an object for each run, without what tasks were given or returned."""
    labels: dict[str, Any] = {"key": "album:7", "name": "make album 7", "url": "/albums/7/"}
    one = stages.start([(note, 1, {"value": "the-secret"})], {"album": "the-secret"}, **labels)
    make_older(one, 50)
    deliver(one.steps[0])
    other = begin(1)
    assert "the-secret" not in run("list", "--json") + run("show", str(one.pk), "--json")
    first, second = listed()
    assert second == {
        "id": one.pk,
        "key": "album:7",
        "name": "make album 7",
        "url": "/albums/7/",
        "database": "shop",
        "status": "succeeded",
        "done": 1,
        "total": 1,
        "stage": 1,
        "stages": 1,
        "percent": 100,
        "created_at": second["created_at"],
        "ended_at": second["ended_at"],
        "age_s": second["age_s"],
        "ended_s": second["ended_s"],
        "duration_s": second["duration_s"],
        "error_step": None,
        "error": "",
        "note": "",
    }
    assert 50 <= second["age_s"] < 110
    assert 0 <= second["ended_s"] < 60
    assert 50 <= second["duration_s"] <= second["age_s"]
    assert (first["id"], first["status"], first["ended_s"]) == (other.pk, "waiting", None)


def test_list_by_state(lite: str) -> None:
    """--state shows only the runs in this state."""
    made = {
        "waiting": begin(1),
        "running": begin(2),
        **{str(status): ended(timedelta(), status, alias=lite) for status in Status.STOPPED},
    }
    deliver(made["running"].steps[0])
    assert set(made) == set(Status.values)
    for state, one in made.items():
        assert [row["id"] for row in listed("--state", state)] == [one.pk]
    assert "invalid choice: 'done'" in refused("list", "--state", "done")[1]


def test_list_is_limited(lite: str) -> None:
    """--limit shows the newest ones and says that there are more; 0 shows all."""
    ids = [begin(1).pk for _ in range(3)]
    assert [row["id"] for row in listed("--limit", "2")] == ids[:0:-1]
    assert run("list", "--limit", "2").endswith("\nThere are more: --limit is 2.\n")
    for limit in ("3", "0"):
        assert [row["id"] for row in listed("--limit", limit)] == ids[::-1]
        assert "There are more" not in run("list", "--limit", limit)


# show


def test_show_of_a_run(shop: str, queue: Queue) -> None:
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


def test_show_tells_what_is_wrong(shop: str, queue: Queue) -> None:
    """Steps whose process is gone, that were repaired, and all that wait for a worker."""
    one = begin(5, 1)
    dead, repaired, late, retried, fresh, _ = one.steps
    leave_silent(one)
    at(repaired).update(note="its process died, and it was sent again", starts=2)
    at(retried).update(error_type="ConnectionError", error="refused", due_at=Now())
    one.steps.exclude(pk__in=[late.pk, dead.pk]).update(due_at=Now())
    StageRun.objects.using(shop).update(stage_at=Now() - LONG)
    found = shown(one.pk)["steps"]
    assert [row["task_id"] for row in found] == [
        step.task_id for step in (dead, repaired, late, retried, fresh)
    ]
    assert [row["status"] for row in found] == ["running"] + ["waiting"] * 4
    assert found[0]["remaining_s"] == 0
    assert found[2]["waits_s"] >= LONG.total_seconds()
    assert found[3]["error"] == "ConnectionError: refused"
    text = " ".join(run("show", str(one.pk)).split())
    assert re.search(rf"{dead.task_id}, for \d+\.\ds\b", text)
    assert "pid 42 on web1, gone waiting" in text
    assert "begun 2 times sweep: its process died, and it was sent again" in text
    assert f"{late.task_id}, for 6min waiting" in text
    assert re.search(rf"ConnectionError: refused .* {fresh.task_id}, for \d+\.\ds$", text)


def test_show_of_a_failure(lite: str) -> None:
    """A failed step has its error and task id, and the bars say what was stopped."""
    one = begin(3, 1)
    failing = fail(one)
    text = run("show", str(one.pk))
    assert "Stage 1  [....................]  0/3  1 failed, 2 aborted\n" in text
    assert "Stage 2  [....................]  0/1  1 aborted\n" in text
    *_, name, place, error = text.splitlines()
    assert (name, error) == (f"failed    {NAME}", "    ValueError: no such album")
    assert re.fullmatch(rf"    stage 1, {failing.task_id}, took \S+", place)


@stages.step
def divide(params: dict[str, Any], by: int) -> None:
    """Fail in a function of another's."""
    Fraction(1, by)


def test_show_tells_where_an_error_comes_from(lite: str) -> None:
    """A failed step comes first, with its duration, its arguments and its traceback's end."""
    task = shared_task(base=SafeTask, name="tests.command.divide")(divide)
    run_stages([(note, 2), (task, 1, {"by": 1}), (task, 1, {"by": 0})])
    one = StageRun.objects.using(lite).get()
    (row,) = shown(one.pk)["steps"]
    assert row["error"] == "ZeroDivisionError: Fraction(1, 0)"
    assert row["traceback"].splitlines()[-1] == row["error"]
    assert row["duration_s"] >= 0
    text = run("show", str(one.pk))
    step = one.error_step
    assert step is not None
    assert re.search(rf"stage 2, {step.task_id}, took \d+\.\ds\n    \{{\"by\": 0\}}\n", text)
    assert "Fraction(1, by)\n" in text
    assert text.count(row["error"]) == 2  # once of the run


def test_show_hides_arguments(lite: str, settings: Settings) -> None:
    """Without SHOW_ARGUMENTS no argument is shown."""
    settings.DJANGO_CELERY_SAFE = {"SHOW_ARGUMENTS": False}
    one = stages.start([(note, 1, {"value": "the-secret"})])
    assert "the-secret" not in run("show", str(one.pk))


def test_a_step_that_no_worker_can_run(lite: str) -> None:
    """A task that the project does not have shows at once in the run's page, without a worker."""
    one = begin(1)
    one.steps.update(task="shop.tasks.renamed")
    (row,) = shown(one.pk)["steps"]
    assert row["error"].startswith("NotRegistered: This project has no task of this name")
    assert 0 <= row["waits_s"] < 60
    # A worker that drops the message says so in the row, and so the list has it too.
    one.steps.update(error_type="NotRegistered", error="A worker on web1 dropped the message")
    listing = " ".join(run("list").split())
    assert f"{one.steps[0]} waits: NotRegistered: A worker on web1 dropped" in listing
    assert (listed()[0]["error_step"], listed()[0]["error"]) == (None, "")


def test_list_by_name_key_and_task(lite: str) -> None:
    """A run is called by its name, found by a part of it or of its key, and by a step's task."""
    one = stages.start([(note, 1)], key="album:7", name="Make Ann's album", url="/albums/7/")
    other = stages.start([(add, 1)], key="album:71")
    text = run("list", "--search", "ANN")
    assert text.startswith(f"Run {one.pk} (Make Ann's album): waiting, stage 1 of 1, ")
    assert text.splitlines()[1] == "    album:7, /albums/7/"
    assert [row["id"] for row in listed("--search", "ALBUM:7")] == [other.pk, one.pk]
    assert [row["id"] for row in listed("--task", add.name, "--state", "waiting")] == [other.pk]
    assert run("list").startswith(f"Run {other.pk} (album:71): waiting")
    assert run("list", "--search", "bob") == run("list", "--task", "no") == "No such run.\n"
    assert run("abort", str(one.pk)).startswith(f"Run {one.pk} (Make Ann's album) was aborted: ")


def test_show_of_a_run_that_failed_without_a_step(lite: str) -> None:
    """The run shows that a stage's params could not be kept."""
    one = begin(1)
    rows = StageRun.objects.using(lite)
    rows.update(status=Status.FAILED, ended_at=Now(), error="too long")
    assert "\n    too long\n" in run("show", str(one.pk))
    assert (shown(one.pk)["error"], shown(one.pk)["error_step"]) == ("too long", None)


def test_show_as_json(lite: str) -> None:
    """--json has the run as in the list, its stages with all counts, and the same steps."""
    one = begin(2, 1)
    step = one.steps[0]
    claim(step)
    row = shown(one.pk)
    assert [*listed()[0], "by_stage", "steps"] == list(row)
    assert row["by_stage"] == [
        {"stage": 1, "priority": 2, "total": 2, "waiting": 1, "running": 1,
         "succeeded": 0, "failed": 0, "aborted": 0},
        {"stage": 2, "priority": 1, "total": 1, "waiting": 1, "running": 0,
         "succeeded": 0, "failed": 0, "aborted": 0},
    ]  # fmt: skip
    found, waiting = row["steps"]
    assert (waiting["status"], waiting["duration_s"]) == ("waiting", None)
    assert found.pop("duration_s") >= 0
    assert 0 < found.pop("remaining_s") <= 600
    assert found == {
        "task": NAME,
        "task_id": step.task_id,
        "status": "running",
        "stage": 1,
        "host": "web1",
        "pid": 42,
        "started_at": at(step).get().started_at.isoformat(),
        "ended_at": None,
        "waits_s": None,
        "starts": 1,
        "deaths": 0,
        "resent": 0,
        "error": "",
        "traceback": "",
        "note": "",
    }


def test_show_is_limited(lite: str) -> None:
    """--limit counts steps: if a thousand fail, one screen shows enough of them."""
    one = begin(3)
    for step in one.steps:
        claim(step)
    text = run("show", str(one.pk), "--limit", "2")
    assert text.endswith("\nThere are more steps: --limit is 2.\n")
    assert text.count("running   ") == len(shown(one.pk, "--limit", "2")["steps"]) == 2
    for limit in ("3", "0"):
        assert run("show", str(one.pk), "--limit", limit).count("running   ") == 3
        assert "There are more" not in run("show", str(one.pk), "--limit", limit)


def test_nothing_steers_the_terminal(lite: str) -> None:
    """Names of tasks and hosts, and texts of errors, are escaped, and long lines wrapped."""
    one = begin(1)
    claim(one.steps[0], host=f"web\x1b[2J{'1' * 100}")
    StageRun.objects.using(lite).update(note="\x1b]0;title\x07" * 20)
    one.steps.update(task="evil\x1b[31m.task", error="\x9b31m" * 50, note="\u202e" * 30)
    out = run("list") + run("show", str(one.pk))
    assert out.isascii()
    assert not set(out) & {chr(code) for code in range(32) if chr(code) != "\n"}
    assert "evil\\x1b[31m.task" in out


def test_a_run_that_is_not_there(lite: str) -> None:
    """An unknown run is an error with a sentence; an id is a whole number."""
    for action in ("show", "resume", "abort"):
        assert refused(action, "99") == (
            "",
            "There is no run 99. `manage.py celery_stages list` shows the IDs.",
        )
        for text in ("x", "1.5", "9" * 30):
            assert f"'{text}' is not a whole number" in refused(action, text)[1]


# resume, abort


def test_resume(shop: str, queue: Queue) -> None:
    """Failed steps and later ones are sent again, and steps that succeeded are not."""
    one = begin(2, 1)
    deliver(one.steps[0])
    fail(one)
    before = one.steps[1].task_id
    told = f"Run {one.pk} would go on: stage 1 of 2, 1 of 3 steps done (33 %).\n"
    sent = len(queue())
    assert run("resume", str(one.pk), "--dry-run") == told
    assert (shown(one.pk)["status"], one.steps[1].task_id, len(queue())) == ("failed", before, sent)
    assert OutboxMessage.objects.using(shop).count() == 0
    assert run("resume", str(one.pk)) == told.replace("would go on", "goes on")
    assert queue()[sent:] == [one.steps[1].task_id] != [before]
    for step in one.steps[1:]:
        deliver(step)
    assert shown(one.pk)["status"] == "succeeded"


def test_abort(shop: str, queue: Queue) -> None:
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


def test_those_that_can_not_be_changed_are_named(lite: str) -> None:
    """Each of several runs is changed if it can be; the others are told of, and the status is 1."""
    goes, done, other = begin(1), ended(timedelta(), alias=lite), begin(1)
    ids = [str(pk) for pk in (goes.pk, done.pk, 99, other.pk, goes.pk)]
    for arguments in (["--dry-run"], []):
        out, why = refused("abort", *ids, *arguments)
        assert [line.split()[1] for line in out.splitlines()] == [str(goes.pk), str(other.pk)]
        assert why == (
            f"Can't abort run {done.pk}: it has succeeded. Nothing was changed. There is no run "
            f"99. `manage.py celery_stages list` shows the IDs."
        )
    out, why = refused("resume", str(done.pk), str(goes.pk))
    assert out == f"Run {goes.pk} goes on: stage 1 of 1, 0 of 1 steps done (0 %).\n"
    assert why == f"Can't resume run {done.pk}: it is succeeded. Nothing was changed."
    assert "--database" not in why


def test_resume_waits_for_what_runs(lite: str) -> None:
    """A run of which a step still runs is not resumed, and the step is named."""
    one = begin(2)
    claim(one.steps[0])
    run("abort", str(one.pk))
    for arguments in (["--dry-run"], []):
        why = refused("resume", str(one.pk), *arguments)[1]
        assert f"its step {one.steps[0]} still runs" in why
    assert [step.status for step in one.steps] == ["running", "aborted"]


# sweep, prune


def test_sweep_prints_each_repair(shop: str, queue: Queue) -> None:
    """A repair has its run, its step and the reason; without any it says so."""
    assert run("sweep") == "0 repair(s).\n"
    dead, lost, stuck = leave_silent(begin(1)), leave_unbegun(begin(1)), leave_stuck(begin(1, 1))
    told = [
        f"Run {dead.run_id}, {dead}: its process died (process 42 on web1), and it was sent again.",
        f"Run {lost.run_id}, {lost}: no worker began it for long, so it was sent again.",
        f"Run {stuck.run_id}: its stage was complete, and it did not go on; now it did.",
        "3 repair(s).",
    ]
    assert run("sweep").split() == " ".join(told).split()
    assert run("sweep") == "0 repair(s).\n"
    assert len(queue()) == 3 + 3


def test_sweep_with_another_patience(lite: str, queue: Queue) -> None:
    """--unstarted-after says how long a step may wait to be begun; five minutes if not said."""
    one = begin(1)
    wait_since(one, timedelta(seconds=270))
    assert run("sweep").endswith("0 repair(s).\n")
    assert run("sweep", "--unstarted-after", "1h").endswith("0 repair(s).\n")
    assert run("sweep", "--unstarted-after", "4m").endswith("1 repair(s).\n")
    assert "is not a valid time" in refused("sweep", "--unstarted-after", "soon")[1]


def test_prune(shop: str, queue: Queue, settings: Settings) -> None:
    """Runs that ended a STAGES_RETENTION ago go; --dry-run only counts, --older-than chooses."""
    for days in (1, 8, 9):
        ended(timedelta(days=days), alias=shop)
    begin(1)
    assert run("prune", "--dry-run") == "2 run(s) would be deleted.\n"
    assert run("prune") == "2 run(s) were deleted.\n"
    assert run("prune") == "0 run(s) were deleted.\n"
    assert run("prune", "--older-than", "12h", "--dry-run") == "1 run(s) would be deleted.\n"
    assert run("prune", "--older-than", "2d") == "0 run(s) were deleted.\n"
    settings.DJANGO_CELERY_SAFE = {"STAGES_RETENTION": "a week"}
    assert "STAGES_RETENTION='a week'" in refused("prune")[1]
    assert run("prune", "--older-than", "12h") == "1 run(s) were deleted.\n"
    assert [row["status"] for row in listed()] == ["waiting"]


# Databases


def test_another_database(lite: str, make_database: MakeDatabase) -> None:
    """--database names another than the router's, before the action or after it."""
    here = begin(1)
    other = make_database("sqlite-immediate", "other")
    with runs_in(other):
        begin(1)
        there = begin(1)
    assert [row["id"] for row in listed()] == [here.pk]
    assert [row["id"] for row in listed("--database", "other")] == [there.pk, there.pk - 1]
    assert run("--database", "other", "abort", str(there.pk)).startswith(f"Run {there.pk} was ")
    assert run("resume", str(there.pk), "--database", "other").startswith(f"Run {there.pk} goes")
    leave_silent(there)
    assert run("sweep") == "0 repair(s).\n"
    assert run("sweep", "--database", "other").endswith("1 repair(s).\n")
    assert shown(here.pk)["status"] == "waiting"


def test_several_databases(lite: str, make_database: MakeDatabase) -> None:
    """The list goes through all that are named; an id needs one of them."""
    begin(1)
    with runs_in(make_database("sqlite-immediate", "other")):
        begin(1)
    both = ["--database", "shop", "--database", "other"]
    assert [row["database"] for row in listed(*both)] == ["shop", "other"]
    lines = run("list", *both).splitlines()
    assert (lines[0], lines[3]) == ("shop", "other")
    assert run("list", *both, "--limit", "1").endswith("There are more: --limit is 1.\n")
    assert run("prune", *both) == "0 run(s) were deleted.\n"
    assert run("sweep", *both, "--unstarted-after", "0").endswith("2 repair(s).\n")
    for action in ("show", "resume", "abort"):
        assert refused(action, "1", *both)[1] == (
            "shop and other have IDs of their own: say which is meant by --database."
        )


@pytest.mark.parametrize("action", ACTIONS)
def test_a_missing_table_hints_at_migrate(
    make_database: MakeDatabase, tmp_path: Path, action: str
) -> None:
    """Where the tables are missing, each action says what to run, and for which database."""
    assert make_database
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        out, why = refused(*action.split(), "--database", "empty")
        assert out == ""
    assert why.startswith("The database 'empty' has no table for runs of stages (")
    assert "django_celery_safe_stage" in why
    assert why.endswith("). Run manage.py migrate --database=empty.")


def test_a_database_that_is_gone(
    make_database: MakeDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    """A database that does not answer fails each action with one sentence, not with migrate."""
    assert make_database
    with registered("gone", gone_settings()):
        for action in ACTIONS:
            assert status_of_program(*action.split(), "--database", "gone") == 1
            out, err = capsys.readouterr()
            assert err.startswith("CommandError: The database can't be asked, of gone: ")
            assert "migrate" not in err
            assert out == ""


@pytest.mark.parametrize("action", ["", *dict.fromkeys(action.split()[0] for action in ACTIONS)])
def test_help_reads_well(capsys: pytest.CaptureFixture[str], action: str) -> None:
    """--help names the actions, and for each one what it does."""
    commands.check_help("celery_stages", action, "{list,show,resume,abort,sweep,prune}", capsys)


def test_a_rehearsal_leaves_nothing(lite: str, queue: Queue) -> None:
    """The sends of a --dry-run never happen, neither at the next commit nor by a relay."""
    one = ended(timedelta(), Status.ABORTED, alias=lite)
    before = queue()
    with hearing(stage_started) as heard:
        run("resume", str(one.pk), "--dry-run")
        with transaction.atomic(using=lite):
            assert connections[lite].run_on_commit == []
            begin(1)
    assert [said["run"] for said in heard] == [one.pk + 1]
    (step,) = StageStep.objects.using(lite).filter(run=one.pk + 1)
    assert queue() == [*before, step.task_id]
    assert OutboxMessage.objects.using(lite).count() == 0


# The documentation


def test_options_are_documented() -> None:
    """The commands page has every action and option of ``celery_stages`` that is its own."""
    text = page(COMMANDS).section("celery_stages")
    command = celery_stages.Command()
    assert {name for name in own_arguments(command) if f"`{name}" not in text} == set()


def test_json_keys_are_documented(lite: str) -> None:
    """The commands page has the keys of runs, stages and steps as JSON, in order."""
    one = begin(1)
    claim(one.steps[0])
    row = shown(one.pk)
    found = {
        "The keys of a run": list(row),
        "The keys of by_stage": list(row["by_stage"][0]),
        "The keys of steps": list(row["steps"][0]),
    }
    for heading, keys in found.items():
        assert [names_in(cells[0])[0] for cells in page(COMMANDS).rows(heading)] == keys
