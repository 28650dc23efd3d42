"""manage.py celery_outbox: its output, its effects, and its exit status."""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from celery import Celery, Signature
from django.db import connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils.translation import get_language
from pytest_django import Settings

from django_celery_safe import send_on_commit
from django_celery_safe.databases import Now
from django_celery_safe.leases.holder import Holder, encode_holder
from django_celery_safe.management.commands.celery_outbox import run_all, stopping
from django_celery_safe.management.heartbeat import HeartbeatFile
from django_celery_safe.models import OutboxMessage, OutboxRelay
from django_celery_safe.sending.relay import BATCH, Relay
from django_celery_safe.signals import task_sent
from tests import commands
from tests.app.celery import app as app_of_tests
from tests.app.tasks import add, note
from tests.checking import add_task, app_without_tasks
from tests.conftest import MakeDatabase, UseBroker
from tests.listening import receiving
from tests.processes import FunctionFailed, KeptProcess, start_in_process, tell, wait_for
from tests.processes.settings import settings_environment
from tests.servers import RedisServer
from tests.servers.databases import DatabaseKind, gone_settings, registered, sqlite_settings
from tests.terminal import answer

ROOT = Path(__file__).resolve().parent.parent

#: An argument that must show nowhere.
SECRET = "the-secret-of-the-argument"
#: Seconds until a process must have done what is waited for.
PATIENCE = 100
#: A moment long ago, s since the epoch.
LONG_AGO = 1_000_000_000
#: Where no broker is.
NOBODY = "redis://:password@127.0.0.1:1/0"


run = partial(commands.run_in_80_columns, "celery_outbox")
listed = partial(commands.listed, "celery_outbox")
refused = partial(commands.refused, "celery_outbox")
status_of_program = partial(commands.status_of_program, "celery_outbox")


class NotInDefault:
    """Keeps the outbox out of the default database, which is in memory and of all tests."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """Return False for the package's tables there, else no opinion."""
        return False if (db, app_label) == ("default", "django_celery_safe") else None


@pytest.fixture(autouse=True)
def _outboxes_of_this_test(settings: Settings) -> None:
    """Let only the databases that the test makes have an outbox, in its processes too."""
    settings.DATABASE_ROUTERS = ["tests.test_outbox_command.NotInDefault"]


@pytest.fixture
def alias(make_database: MakeDatabase, db_kind: DatabaseKind, broker: Celery) -> str:
    """The one database with an outbox."""
    return make_database(db_kind, "shop")


@pytest.fixture
def other(make_database: MakeDatabase) -> str:
    """A second database with an outbox."""
    return make_database("sqlite-immediate", "other")


@pytest.fixture
def queue(redis_server: RedisServer, broker: Celery) -> Callable[[], list[str]]:
    """Tell the task ids of what waits at the broker, which is empty before the test."""
    return lambda: sent_to(redis_server)


def sent_to(server: RedisServer, database: int = 1) -> list[str]:
    """Return the task ids of what waits in the default queue of a broker, the oldest first."""
    with server.client(db=database) as client:
        messages = [json.loads(text) for text in client.lrange("celery", 0, -1)]
    return [message["headers"]["id"] for message in reversed(messages)]


@contextmanager
def broker_at(url: str) -> Iterator[None]:
    """Let the tests' app have its broker elsewhere during the block."""
    before = app_of_tests.conf.broker_url
    app_of_tests.conf.broker_url = url
    try:
        with override_settings(CELERY_BROKER_URL=url):  # which Celery before 5.7 asks first
            yield
    finally:
        app_of_tests.conf.broker_url = before


def headings(text: str) -> list[str]:
    """Return the lines that are not indented."""
    return [line for line in text.splitlines() if not line.startswith(" ")]


def leave(alias: str, task: Any = add, *, due: bool = True, age: float = 0) -> OutboxMessage:
    """Let a message be there whose sender died right after its commit, ``age`` s ago."""
    what = task if isinstance(task, Signature) else task.s(SECRET)
    with transaction.atomic(using=alias):
        send_on_commit(what, using=alias, outbox=True)
        connections[alias].run_on_commit.clear()
    rows = OutboxMessage.objects.using(alias)
    pk = rows.latest("pk").pk
    rows.filter(pk=pk).update(created_at=Now() - timedelta(seconds=age))
    if due:
        rows.filter(pk=pk).update(due_at=Now())
    return rows.get(pk=pk)


def copy(row: OutboxMessage, number: int) -> None:
    """Let so many more messages be there that are like this one."""
    values = {field.attname: getattr(row, field.attname) for field in row._meta.fields[1:]}
    copies = [OutboxMessage(**values) for _ in range(number)]
    OutboxMessage.objects.using(row._state.db).bulk_create(copies)


def leave_dead(alias: str, task: Any = add, error: str = "refused") -> OutboxMessage:
    """Let a message be there that failed too often."""
    row = leave(alias, task)
    assert row.fail(error, attempts=1)
    return row


def leave_sent(alias: str, age: float = 0) -> OutboxMessage:
    """Let a message be there that was sent ``age`` s ago."""
    row = leave(alias)
    rows = OutboxMessage.objects.using(alias).filter(pk=row.pk)
    rows.settle(keep=True)
    rows.update(sent_at=Now() - timedelta(seconds=age))
    return row


def ids(alias: str) -> set[int]:
    """Return the ids of all rows."""
    return set(OutboxMessage.objects.using(alias).values_list("pk", flat=True))


def dead(alias: str) -> set[int]:
    """Return the ids of the dead rows."""
    return set(OutboxMessage.objects.using(alias).dead().values_list("pk", flat=True))


# status


@pytest.mark.sql
def test_status(alias: str) -> None:
    """Messages are counted by state, the oldest is the oldest pending one, the relay is named."""
    states = ["pending", "sent", "running", "done", "failed", "dead"]
    nothing = {"oldest_s": None, "relay": None, "relay_seen_s": None}
    empty = {**dict.fromkeys(states, 0), **nothing}
    assert json.loads(run("status", "--json")) == {"shop": empty}
    assert run("status").endswith("no relay has been seen yet\n")
    run("relay", "--once")
    OutboxRelay.objects.using(alias).update(host="web\x1b[1m1", seen_at=Now() - timedelta(hours=3))
    leave(alias, age=30)
    leave(alias, due=False, age=90)
    died, sent = leave_dead(alias), leave_sent(alias)
    OutboxMessage.objects.using(alias).filter(pk__in=[died.pk, sent.pk]).update(
        created_at=Now() - timedelta(days=9)
    )
    row = json.loads(run("status", "--json"))["shop"]
    assert [row[state] for state in states] == [2, 1, 0, 0, 0, 1]
    assert 90 <= row["oldest_s"] < 690
    assert row["relay"] == f"web\x1b[1m1 pid {os.getpid()}"
    assert 3 * 3600 <= row["relay_seen_s"] < 4 * 3600
    lines = [line.split() for line in run("status").splitlines()]
    assert [line[:2] for line in lines[1:4]] == [["pending", "2,"], ["sent", "1"], ["running", "0"]]
    assert " ".join(lines[7]) == f"a relay was seen 3h ago (web\\x1b[1m1 pid {os.getpid()})"


def test_the_ages_decide_the_exit_status(
    alias: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """status fails, after the figures, if a message waits or no relay was seen for longer."""
    leave_dead(alias)
    leave_sent(alias)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert run("list") != run("status")
    # However large messages are, what does not show is not read.
    assert not [query for query in queries.captured_queries if "body" in query["sql"]]
    OutboxMessage.objects.using(alias).update(created_at=Now() - timedelta(days=1))
    assert status_of_program("status", "--max-age", "0") == 0  # only what waits has an age
    leave(other, age=500)
    run("relay", "--once", "--database", alias)
    for arguments, words in (
        ("--max-age 60", "longer than --max-age 60."),
        ("--max-age 2.5 --json", "longer than --max-age 2.5."),
        ("--max-age 1h", ""),
        ("--max-age 60 --database shop", ""),
        ("--max-relay-age 60", "No relay has been seen in 'other' yet; --max-relay-age is 60."),
        ("--max-relay-age 1h --database shop", ""),
    ):
        capsys.readouterr()
        assert status_of_program("status", *arguments.split()) == bool(words)
        out, err = capsys.readouterr()
        assert "pending" in out
        assert words in err
    OutboxRelay.objects.using(alias).update(seen_at=Now() - timedelta(hours=2))
    why = refused("status", "--max-relay-age", "60", "--database", alias)[1]
    assert why.startswith("No relay has been seen in 'shop' for 2h; ")


# list, show


def test_list(alias: str) -> None:
    """A message has its id, task, task id, state and age, and what was wrong if it failed."""
    assert run("list") == "The outbox is empty.\n"
    assert run("list", "--state", "dead") == run("list", "--task", "x") == "No such message.\n"
    assert listed() == []
    waits, died = leave(alias, age=7200), leave_dead(alias, note, "the queue is full")
    first, details, second, more, failed, error = run("list").splitlines()
    assert first.split() == [str(waits.pk), "tests.app.tasks.add"]
    assert details.split() == ["pending,", "2h", "old,", waits.task_id]
    assert second.split() == [str(died.pk), "tests.app.tasks.note"]
    assert (more.split()[0], more.split()[-1]) == ("dead,", died.task_id)
    assert (failed.strip(), error.strip()) == ("1 failed attempt(s)", "the queue is full")


def test_list_as_json(alias: str) -> None:
    """--json has an object for each message, with ages in seconds; --state and --task choose."""
    waits, died, sent = leave(alias, due=False, age=50), leave_dead(alias), leave_sent(alias)
    noted = leave(alias, note)
    rows = listed("--task", add.name)
    assert [row["id"] for row in rows] == [waits.pk, died.pk, sent.pk]
    assert [row["state"] for row in rows] == ["pending", "dead", "sent"]
    assert [row["due_in_s"] is None for row in rows] == [False, True, True]
    assert rows[0]["due_in_s"] < 30
    assert 50 <= rows[0]["age_s"] < 650
    assert (rows[1]["task"], rows[1]["task_id"]) == (add.name, died.task_id)
    assert (rows[1]["attempts"], rows[1]["error"], rows[1]["deaths"]) == (1, "refused", 0)
    for state, row in {"pending": noted, "dead": died, "sent": sent}.items():
        assert listed("--state", state)[-1]["id"] == row.pk
    assert [row["id"] for row in listed("--task", note.name, "--state", "pending")] == [noted.pk]


def test_several_databases(alias: str, other: str) -> None:
    """Each row is shown with its database, without which its id is good for nothing."""
    rows = [leave_dead(alias), leave_dead(other)]
    first, second = (f"{row.pk}  {row.task}" for row in rows)
    assert headings(run("list")) == ["shop", first, "other", second]
    assert headings(run("list", "--database", "other")) == [second]
    assert [row["database"] for row in listed()] == ["shop", "other"]
    pk = str(rows[0].pk)
    for action in ("retry", "discard --no-input"):
        why = refused(*action.split(), pk)[1]
        assert why == "shop and other have IDs of their own: say which is meant by --database."
    run("discard", "--no-input", pk, "--database", other)
    assert (len(dead(alias)), dead(other)) == (1, set())
    leave_dead(other)
    assert run("retry", "--all").startswith("2 message(s) ")
    # --limit is of all databases; 0 is no limit.
    copy(rows[0], 58)
    assert (len(listed()), len(listed("--limit", "0"))) == (50, 60)
    assert run("list", "--limit", "59").endswith("There are more: --limit is 59.\n")
    assert "There are more" not in run("list", "--limit", "60")
    assert "'1.5' is not a whole number from 0 on" in refused("list", "--limit=1.5")[1]


def test_show_has_all_of_a_message(alias: str) -> None:
    """Its error, its process and the lines of its traceback, which may steer no terminal."""
    message = leave(alias)
    OutboxMessage.objects.using(alias).update(
        due_at=None,
        ended_at=Now(),
        error_type="ValueError",
        error="no such order",
        traceback="Traceback:\n  in \x1b[1mcharge\nValueError: no such order\n",
        holder=encode_holder("task", Holder(host="web1", pid=42, task=add.name)),
    )
    printed = run("show", str(message.pk))
    lines = [line.split(maxsplit=1) for line in printed.split("\n\n")[0].splitlines()]
    assert ["state", "failed"] in lines
    assert ["process", "process 42 on web1"] in lines
    assert printed.endswith("\nTraceback:\n  in \\x1b[1mcharge\nValueError: no such order\n")
    found = json.loads(run("show", str(message.pk), "--json"))
    assert (found["state"], found["error_type"], found["deaths"]) == ("failed", "ValueError", 0)
    assert found["traceback"].splitlines()[1] == "  in \x1b[1mcharge"
    assert "There is no message 99 in the outbox of 'shop'" in refused("show", "99")[1]


def test_no_argument_shows(
    alias: str, queue: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """No action prints or logs the value of an argument, in either form."""
    caplog.set_level("DEBUG", "django_celery_safe")
    row, died, broken = leave(alias), leave_dead(alias), leave(alias)
    OutboxMessage.objects.using(alias).filter(pk=broken.pk).update(properties="{}")
    actions = ("status", "list", "relay --once", "list --json", f"discard {died.pk} --no-input")
    output = "".join(run(*action.split()) for action in actions)
    assert SECRET in repr(bytes(died.body))
    assert SECRET not in output + caplog.text
    assert queue() == [row.task_id]


# retry, discard


def test_retry_and_discard(alias: str, queue: Callable[[], list[str]]) -> None:
    """A message that failed is due at once, one that is discarded is never sent; others stay."""
    died, other, waits, gone = leave_dead(alias), leave_dead(alias), leave(alias), leave(alias)
    assert not waits.fail("refused", attempts=20)
    assert run("retry", str(died.pk), str(waits.pk)) == "2 message(s) are due now.\n"
    assert OutboxMessage.objects.using(alias).get(pk=died.pk).attempts == 0
    assert run("discard", "--no-input", str(gone.pk)) == "1 message(s) were deleted.\n"
    assert run("relay", "--once").endswith("Sent 2 message(s).\n")
    assert set(queue()) == {died.task_id, waits.task_id}
    assert ids(alias) == {other.pk}


def test_discard_asks(alias: str) -> None:
    """discard shows what it is about; only yes is yes, and what dies meanwhile stays."""
    died = {leave_dead(alias).pk for _ in range(22)}
    assert "there is no terminal to ask at" in refused("discard", "--all")[1]
    assert answer("no\n", "celery_outbox", "discard", "--all")[1].startswith("The answer was not")
    later = set()

    def read(question: str) -> None:
        assert question.count(f"  {add.name}\n") == 20
        assert "\n... and 2 more.\n" in question
        assert question.endswith("This can't be undone.\nDiscard 22 message(s)? [yes/no] ")
        assert dead(alias) == died
        later.add(leave_dead(alias).pk)

    told, why = answer("yes\n", "celery_outbox", "discard", "--all", meanwhile=read)
    assert (told.endswith("22 message(s) were deleted.\n"), why) == (True, "")
    assert dead(alias) == later


@pytest.mark.parametrize("action", ["retry", "discard --no-input"])
def test_all_are_the_dead(alias: str, action: str) -> None:
    """--all means every dead message, --task only those of one task; --dry-run changes nothing."""
    others = {leave(alias).pk, leave_sent(alias).pk}
    leave_dead(alias, note)
    leave_dead(alias, note)
    died = leave_dead(alias).pk
    rows = OutboxMessage.objects.using(alias)
    before = dict(rows.values_list("pk", "due_at"))
    for arguments, number in (("--all", 3), (f"--all --task {note.name}", 2), (str(died), 1)):
        would = run(*action.split(), *arguments.split(), "--dry-run")
        assert would.startswith(f"{number} message(s) would be ")
    assert dict(rows.values_list("pk", "due_at")) == before
    assert run(*action.split(), "--all", "--task", note.name).startswith("2 message(s) ")
    assert dead(alias) == {died}
    assert run(*action.split(), "--all").startswith("1 message(s) ")
    assert ids(alias) == (set(before) if action == "retry" else others)
    after = dict(rows.filter(pk__in=others).values_list("pk", "due_at"))
    assert after == {pk: before[pk] for pk in others}


@pytest.mark.parametrize("action", ["retry", "discard"])
def test_a_choice_has_to_be_made(alias: str, action: str) -> None:
    """No choice, or two, are refused; ids that are not there fail the command, others are done."""
    died, sent = leave_dead(alias), leave_sent(alias)
    pk = str(died.pk)
    for arguments, words in (
        ([], "Give the IDs"),
        ([pk, "--all"], "Give the IDs"),
        (["--task", add.name], "Give the IDs"),
        ([pk, "--task", add.name], "--task goes with --all"),
        (["9" * 30], "is not a whole number from 0 on"),
        ([pk, pk, str(sent.pk), str(2**63 - 1), "--dry-run"], "2 of 3 message(s) are not there"),
    ):
        assert words in refused(action, *arguments)[1]
    assert dead(alias) == {died.pk}


# prune


def test_prune_goes_by_age(alias: str, other: str, settings: Settings) -> None:
    """prune deletes what was sent before the retention, or --older-than, and nothing else."""
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"sent": 3600}}
    left = {leave_sent(alias, 60).pk, leave(alias).pk}
    leave_sent(alias, 4000)
    leave_sent(other, 9999)
    assert run("prune", "--dry-run") == "2 sent message(s) would be deleted.\n"
    assert run("prune", "--older-than", "5000") == "1 sent message(s) were deleted.\n"
    assert run("prune") == "1 sent message(s) were deleted.\n"
    assert ids(alias) == left


# Refusals and errors


ACTIONS = ("status", "list", "retry --all", "discard --all", "prune", "relay --once")


def test_no_outbox(broker: Celery, make_database: MakeDatabase, tmp_path: Path) -> None:
    """Without a database that has the table, each action fails and says what to run."""
    assert make_database  # the databases may be asked
    for action in ACTIONS:
        why = refused(*action.split())[1]
        assert why == "No database has the outbox. Run manage.py migrate."
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        for action in ACTIONS:
            why = refused(*action.split(), "--database", "empty")[1]
            assert why.startswith("The database 'empty' has no table for the outbox (")
            assert why.endswith("). Run manage.py migrate --database=empty.")


def test_a_database_that_is_gone(broker: Celery, make_database: MakeDatabase) -> None:
    """A database that does not answer fails each action, and is no empty outbox."""
    assert make_database
    with registered("gone", gone_settings()):
        for action in ACTIONS:
            out, why = refused(*action.split())
            assert why.startswith("The database can't be asked, of gone: OperationalError: ")
            assert out == "" or out.endswith("\nSent 0 message(s).\n")


def test_a_database_without_autocommit(alias: str) -> None:
    """An action's changes would not be committed there, so it refuses, and does nothing."""
    leave(alias)
    with registered("manual", {**connections.settings[alias], "AUTOCOMMIT": False}):
        for action in ("retry --all", "relay --once", "relay --once --database shop"):
            why = refused(*action.split(), "--database", "manual")[1]
            assert why.startswith("The database 'manual' has AUTOCOMMIT off")
    assert run("relay", "--once").endswith("Sent 1 message(s).\n")


def test_what_is_not_there_or_not_valid(alias: str, settings: Settings) -> None:
    """An unknown database, and a retention that can't be used, are refused by their names."""
    known = "DATABASES has no 'nope'; it has default, shop."
    assert refused("list", "--database", "nope")[1] == known
    assert refused("--database", "nope", "list")[1] == known
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"sent": "a week"}}
    for arguments in (["prune"], ["relay", "--once"]):
        assert "RETENTION['sent']='a week'" in refused(*arguments)[1]


# relay --once


def test_relay_once_sends_what_is_due(
    alias: str, other: str, queue: Callable[[], list[str]], settings: Settings
) -> None:
    """relay --once sends what is due everywhere; receivers have the language of the project."""
    settings.LANGUAGE_CODE = "zh-hans"
    languages = []
    rows = [leave(alias), leave(other), leave(other)]
    later, died = leave(alias, due=False), leave_dead(alias)
    assert run("relay", "--once", "--database", alias).endswith("Sent 1 message(s).\n")
    with receiving(task_sent, lambda **fields: languages.append(get_language())):
        first, last = run("relay", "--once").splitlines()
    assert first.startswith("Relaying the outbox of shop, other to redis://")
    assert (last, languages) == ("Sent 2 message(s).", ["zh-hans"] * 2)
    assert queue() == [row.task_id for row in rows]
    assert ids(alias) == {later.pk, died.pk}


def test_relay_once_sends_more_than_a_batch(
    alias: str, queue: Callable[[], list[str]], settings: Settings
) -> None:
    """relay --once goes on until nothing is due; what it sent stays with a retention."""
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"sent": 3600}}
    copy(leave(alias), BATCH)
    assert run("relay", "--once").endswith(f"Sent {BATCH + 1} message(s).\n")
    assert len(queue()) == BATCH + 1
    assert {row["state"] for row in listed("--limit", "0")} == {"sent"}


def test_relay_once_without_a_broker(alias: str, queue: Callable[[], list[str]]) -> None:
    """relay --once fails if the broker is gone; no message loses an attempt, and all stay due."""
    row = leave(alias)
    with broker_at(NOBODY):
        out, why = refused("relay", "--once")
    assert "OperationalError" in why
    assert "password" not in out + why
    with broker_at("nope://127.0.0.1"):
        assert refused("relay", "--once")[1].startswith("broker_url names an unknown transport")
    (found,) = listed()
    assert (found["state"], found["attempts"], found["error"]) == ("pending", 0, "")
    run("relay", "--once")
    assert queue() == [row.task_id]


# relay, in threads


def test_a_thread_relays_for_the_current_app_of_the_command(
    alias: str, redis_server: RedisServer
) -> None:
    """Rows of an app without a name go to its own broker, though threads have another app."""
    stop = threading.Event()
    giving_up = threading.Timer(PATIENCE, stop.set)
    giving_up.start()
    with (
        receiving(task_sent, lambda **said: stop.set()),
        app_without_tasks(redis_server.database_url(3)) as app,
    ):
        app.main = None
        app_of_tests.set_default()
        row = leave(alias, add_task(app, name="tests.unnamed", base=None).s())
        run_all([Relay(alias)], stop)
    giving_up.cancel()
    assert sent_to(redis_server, 3) == [row.task_id]


# the file that a relay touches, for probes


def age_of(path: Path) -> float:
    """Return when a file was touched last, s since the epoch."""
    return path.stat().st_mtime


def make_old(path: Path) -> None:
    """Let a file have been touched long ago."""
    os.utime(path, (LONG_AGO, LONG_AGO))


def test_the_file_is_touched_when_every_relay_took_a_turn(
    alias: str, other: str, tmp_path: Path
) -> None:
    """A relay that hangs lets the file grow old, however busy the others are."""
    path = tmp_path / "relay"
    relays = [Relay(alias), Relay(other)]
    with HeartbeatFile(str(path)).kept(relays) as touch:
        assert path.exists()
        make_old(path)
        relays[0].turns += 5
        touch()
        assert age_of(path) == LONG_AGO
        relays[1].turns += 1
        touch()
        assert age_of(path) > LONG_AGO
        make_old(path)
        touch()
        assert age_of(path) == LONG_AGO
    assert not path.exists()


def test_a_file_that_can_not_be_written(alias: str, tmp_path: Path) -> None:
    """The relay does not begin, and says why; nor does it with --once, which needs no probe."""
    _, why = refused("relay", "--heartbeat-file", str(tmp_path / "none" / "relay"))
    assert why.startswith("--heartbeat-file can't be written: ")
    _, why = refused("relay", "--once", "--heartbeat-file", str(tmp_path / "relay"))
    assert "not allowed with argument" in why


# relay as a process


class RelayProcess:
    """``manage.py celery_outbox relay`` with the settings of the test; see ``relaying``."""

    def __init__(self, process: KeptProcess) -> None:
        self.process = process

    @property
    def log(self) -> str:
        """Its output and its log."""
        return self.process.log

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        with suppress(psutil.NoSuchProcess):
            self.process.process.send_signal(number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Ask it to end, and return its exit status."""
        self.send(number)
        return self.process.wait(PATIENCE)


@contextmanager
def relaying(folder: Path, *arguments: str) -> Iterator[RelayProcess]:
    """Have a relay in a process of its own during the block."""
    command = [sys.executable, "-u", "-m", "django", "celery_outbox", "relay", *arguments]
    process = KeptProcess(
        command,
        folder=ROOT,
        log_path=folder / "relay.log",
        env={**os.environ, **settings_environment()},
    )
    with process:
        relay = RelayProcess(process)
        try:
            yield relay
        except BaseException:
            print(relay.log)
            raise


@pytest.mark.long
def test_a_relay_runs_until_it_is_stopped(
    alias: str, use_broker: UseBroker, settings: Settings, tmp_path: Path
) -> None:
    """A relay waits for its broker, sends what is there and what comes; a signal ends it with 0."""
    with RedisServer() as server:
        server.stop()
        settings.CELERY_BROKER_URL = server.database_url(1)
        before = leave(alias)
        path = tmp_path / "heartbeat"
        with relaying(tmp_path, "--heartbeat-file", str(path)) as relay:
            wait_for(lambda: "The broker can't be reached" in relay.log, PATIENCE)
            assert listed()[0]["attempts"] == 0
            make_old(path)
            wait_for(lambda: age_of(path) > LONG_AGO, PATIENCE, "the file was not touched")
            server.start()
            wait_for(lambda: sent_to(server) == [before.task_id], PATIENCE)
            after = leave(alias)
            wait_for(lambda: sent_to(server) == [before.task_id, after.task_id], PATIENCE)
            wait_for(lambda: ids(alias) == set(), PATIENCE)
            assert relay.end() == 0
    assert not path.exists()
    assert relay.log.startswith("Relaying the outbox of shop to redis://")
    assert relay.log.endswith("Sent 2 message(s).\n")
    assert relay.log.count("can't be reached") == 1
    assert "Traceback" not in relay.log


def be_stopped(second: bool) -> None:
    """Get a signal while a relay works, which asks it to end, or a second one, which ends it."""
    with stopping() as stop:
        signal.raise_signal(signal.SIGINT)
        tell(stop.is_set())
        if second:
            signal.raise_signal(signal.SIGTERM)
    tell("finished")


@pytest.mark.long
def test_the_second_signal_ends_it_at_once() -> None:
    """The first lets it finish its batch, the second ends it as if it had no handler."""
    with start_in_process(be_stopped, False) as process:
        assert (process.receive(), process.receive()) == (True, "finished")
    with start_in_process(be_stopped, True) as process:
        assert process.receive() is True
        with pytest.raises(FunctionFailed):
            process.receive()
        process.process.join(30)
        assert process.process.exitcode == -signal.SIGTERM
