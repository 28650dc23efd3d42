"""manage.py celery_outbox: its output, its effects, and its exit status."""

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils.translation import get_language
from pytest_django import Settings

from django_celery_safe.databases import Now
from django_celery_safe.leases.holder import Holder, encode_holder
from django_celery_safe.management.commands.celery_outbox import kept_heartbeat, run_all
from django_celery_safe.management.console import age
from django_celery_safe.models import OutboxMessage, OutboxRelay
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import task_sent
from tests import commands
from tests.admin import rows
from tests.admin.rows import SECRET, leave_dead, leave_sent
from tests.app.celery import app as app_of_tests
from tests.app.tasks import add, note
from tests.checking import add_task, app_without_tasks
from tests.conftest import MakeDatabase, forget_first_use
from tests.listening import receiving
from tests.processes import KeptProcess, wait_for
from tests.processes.settings import settings_environment
from tests.servers import RedisServer
from tests.servers.databases import DatabaseKind, gone_settings, registered, sqlite_settings
from tests.terminal import answer

ROOT = Path(__file__).resolve().parent.parent

#: Seconds until a process must have done what is waited for.
PATIENCE = 100
#: A moment long ago, s since the epoch.
LONG_AGO = 1_000_000_000
#: Where no broker is.
NOBODY = "redis://:password@127.0.0.1:1/0"


run, listed, refused, status_of_program = commands.of("celery_outbox")


@pytest.fixture(autouse=True)
def _outboxes_of_this_test(settings: Settings) -> None:
    """Let only the databases that the test makes have an outbox, in its processes too."""
    settings.DATABASE_ROUTERS = ["tests.routing.NotInDefault"]


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


#: Lets a message be there that is due, because its sender died right after its commit.
leave = partial(rows.leave, due_at=Now())


def ago(hours: float) -> dict[str, Any]:
    """Return the change that makes a message so old."""
    return {"created_at": Now() - timedelta(hours=hours)}


def copy(row: OutboxMessage, number: int) -> None:
    """Let so many more messages be there that are like this one."""
    values = {field.attname: getattr(row, field.attname) for field in row._meta.fields[1:]}
    copies = [OutboxMessage(**values) for _ in range(number)]
    OutboxMessage.objects.using(row._state.db).bulk_create(copies)


def ids(alias: str) -> set[int]:
    """Return the ids of all rows."""
    return set(OutboxMessage.objects.using(alias).values_list("pk", flat=True))


def dead(alias: str) -> set[int]:
    """Return the ids of the dead rows."""
    return set(OutboxMessage.objects.using(alias).dead().values_list("pk", flat=True))


def id_of(row: OutboxMessage) -> str:
    """Return the ID of a message as the list shows it."""
    return f"{row._state.db}:{row.pk}"


# status


@pytest.mark.sql
def test_status(alias: str) -> None:
    """Messages are counted by state, the oldest is the oldest pending one, the relay is named."""
    states = ["pending", "sent", "running", "failed", "dead"]
    nothing = {"oldest_s": None, "lag_s": 0.0, "relay": None, "relay_seen_s": None}
    assert json.loads(run("status", "--json")) == {"shop": dict.fromkeys(states, 0) | nothing}
    assert run("status").splitlines()[1].split() == ["shop", *"00000", "-", "never"]
    run("relay", "--once")
    OutboxRelay.objects.using(alias).update(host="web\x1b[1m1", seen_at=Now() - timedelta(hours=3))
    leave(alias, **ago(hours=25))
    rows.leave(alias, **ago(hours=0.1))
    leave_dead(alias)
    row = json.loads(run("status", "--json"))["shop"]
    assert [row[state] for state in states] == [2, 0, 0, 0, 1]
    assert 90_000 <= row["oldest_s"] < 90_600
    assert row["relay"] == f"web\x1b[1m1 pid {os.getpid()}"
    assert 3 * 3600 <= row["relay_seen_s"] < 4 * 3600
    _, counts, relay = run("status").splitlines()
    assert counts.split() == ["shop", *"20001", "25h", "3h", "ago"]
    assert relay == f"    web\\x1b[1m1 pid {os.getpid()}"


def test_the_age_decides_the_exit_status(
    alias: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """status fails, after the figures, if a message waits or no relay was seen for longer."""
    leave_dead(alias, **ago(hours=25))
    assert status_of_program("status") == 0
    assert status_of_program("status", "--max-age", "1d") == 1
    assert "No relay has been seen in 'shop' yet." in capsys.readouterr().err
    run("relay", "--once")
    assert status_of_program("status", "--max-age", "60") == 0  # only what waits has an age
    leave(other, **ago(hours=5))
    assert status_of_program("status", "--max-age", "1d", "--json") == 0
    capsys.readouterr()
    assert status_of_program("status", "--max-age", "60", "--json") == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["other"]["pending"] == 1
    assert "A message in 'other' has been waiting for 5h." in err
    OutboxRelay.objects.using(alias).update(seen_at=Now() - timedelta(hours=2))
    assert "in 'shop' for 2h. Run manage.py" in refused("status", "--max-age", "1h")[1]


def test_ages_have_units() -> None:
    """A number without a unit is seconds; what is no time that a date can be away is refused."""
    assert [age(text) for text in ("90", "1.5m", "12h", "7d")] == [90, 90, 43_200, 604_800]
    for text in ("", "-1", "7 d", "7days", "nan", "9" * 400):
        assert f"'{text}' is not a valid time; write" in refused("status", f"--max-age={text}")[1]


# list, show


def test_list(alias: str, other: str) -> None:
    """A message has its ID, state, age, task and task id, and what was wrong if it failed."""
    assert run("list") == "No message.\n"
    assert listed() == []
    waits = leave(alias, **ago(hours=2))
    died = leave_dead(other, "the queue is full", task=note, **ago(hours=5))
    with CaptureQueriesContext(connections[alias]) as queries:
        lines = run("list").splitlines()
    # However large messages are, what does not show is not read.
    assert not [query for query in queries.captured_queries if "body" in query["sql"]]
    assert [lines[0].split(), lines[1].split(), lines[3].split()] == [
        ["ID", "STATE", "AGE", "TASK"],
        [id_of(waits), "pending", "2h", waits.task],
        [id_of(died), "dead", "5h", died.task],
    ]
    assert lines[2:3] + lines[4:] == [
        f"    {waits.task_id}",
        f"    {died.task_id}",
        "    1 failed attempt(s), the queue is full",
    ]
    copy(waits, 49)
    assert run("list").endswith("\nOnly the first 50 are shown; --json has all.\n")


def test_list_as_json(alias: str) -> None:
    """--json has an object for each message, with ages in seconds; --state and --task choose."""
    waits, died, noted = rows.leave(alias, **ago(hours=1)), leave_dead(alias), leave(alias, note)
    first, second = listed("--task", add.name)
    assert (first["id"], first["database"], first["state"]) == (waits.pk, "shop", "pending")
    assert (first["due_in_s"] < 30, 3600 <= first["age_s"] < 4200) == (True, True)
    assert (second["state"], second["due_in_s"], second["task_id"]) == ("dead", None, died.task_id)
    assert (second["attempts"], second["error"], second["deaths"]) == (1, "no route to host", 0)
    assert [row["id"] for row in listed("--state", "dead")] == [died.pk]
    assert [row["id"] for row in listed("--task", note.name, "--state", "pending")] == [noted.pk]


def test_show_has_all_of_a_message(alias: str) -> None:
    """Its error, its process and the lines of its traceback, which may steer no terminal."""
    message = leave(alias)
    OutboxMessage.objects.using(alias).update(
        state="failed",
        due_at=None,
        ended_at=Now(),
        error_type="ValueError",
        error="no such order",
        traceback="Traceback:\n  in \x1b[1mcharge\nValueError: no such order\n",
        holder=encode_holder("task", Holder(host="web1", pid=42, task=add.name)),
    )
    printed = run("show", id_of(message))
    lines = [line.split(maxsplit=1) for line in printed.splitlines()]
    assert ["state", "failed"] in lines
    assert ["process", "web1 pid 42"] in lines
    assert printed.endswith("\nTraceback:\n  in \\x1b[1mcharge\nValueError: no such order\n")
    found = json.loads(run("show", id_of(message), "--json"))
    assert (found["state"], found["error_type"], found["finished"]) == (
        "failed", "ValueError", False,
    )  # fmt: skip
    assert found["traceback"].splitlines()[1] == "  in \x1b[1mcharge"
    assert refused("show", "shop:99")[1] == "There is no message shop:99."
    for text in ("x", "shop:", "nope:1", "1.5", "9" * 30):
        assert refused("show", text)[1] == f"{text} is not an ID that the list shows."


def test_no_argument_shows(
    alias: str, queue: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """No action but show prints or logs the value of an argument, in either form."""
    caplog.set_level("DEBUG", "django_celery_safe")
    row, died, broken = leave(alias), leave_dead(alias), leave(alias)
    OutboxMessage.objects.using(alias).filter(pk=broken.pk).update(properties="{}")
    actions = ("status", "list", "relay --once", "list --json")
    output = "".join(run(*action.split()) for action in actions)
    assert SECRET in repr(bytes(died.body))
    assert SECRET not in output + caplog.text
    assert queue() == [row.task_id]


# retry, discard


def test_retry_and_discard(alias: str, other: str, queue: Callable[[], list[str]]) -> None:
    """A message that failed is due at once, one that is discarded is never sent; others stay."""
    died, stays, waits, gone = leave_dead(alias), leave_dead(alias), leave(other), leave(alias)
    assert not waits.fail("refused", attempts=20)
    assert run("retry", id_of(died), id_of(waits)) == "2 message(s) are due now.\n"
    assert OutboxMessage.objects.using(alias).get(pk=died.pk).attempts == 0
    assert run("discard", "--no-input", id_of(gone)) == "1 message(s) are deleted.\n"
    assert run("relay", "--once").endswith("Sent 2 message(s).\n")
    assert set(queue()) == {died.task_id, waits.task_id}
    assert ids(alias) == {stays.pk}


def test_discard_asks(alias: str) -> None:
    """discard shows what it is about; only yes is yes, and what dies meanwhile stays."""
    died = {leave_dead(alias).pk for _ in range(3)}
    for text in ("no", ""):
        told, why = answer(text, "celery_outbox", "discard", "--all")
        assert why == "The answer was not 'yes', so nothing was done. See --no-input."
    later = set()

    def read(question: str) -> None:
        assert question.count(f"  {add.name}\n") == 3
        assert "Discard 3 message(s)? They are deleted, and their tasks never run." in question
        assert dead(alias) == died
        later.add(leave_dead(alias).pk)

    told, why = answer("yes", "celery_outbox", "discard", "--all", meanwhile=read)
    assert (told.endswith("3 message(s) are deleted.\n"), why) == (True, "")
    assert dead(alias) == later


@pytest.mark.parametrize("action", ["retry", "discard --no-input"])
def test_all_are_the_dead(alias: str, other: str, action: str) -> None:
    """--all means every dead message of every outbox, more than a statement takes too."""
    others = {leave(alias).pk, leave_sent(alias).pk}
    died = leave_dead(alias)
    died.refresh_from_db()
    copy(died, 500)
    leave_dead(other)
    assert run(*action.split(), "--all").startswith("502 message(s) are ")
    assert (dead(alias), dead(other)) == (set(), set())
    assert (ids(alias) == others) is (action != "retry")


@pytest.mark.parametrize("action", ["retry", "discard"])
def test_a_choice_has_to_be_made(alias: str, action: str) -> None:
    """No choice, or two, are refused; IDs that are not there fail the command, others are done."""
    died, sent = leave_dead(alias), leave_sent(alias)
    more = ["--no-input"] if action == "discard" else []
    for arguments in ([], [id_of(died), "--all"]):
        assert re.search("ID.*--all|--all.*ID", refused(action, *arguments)[1])
    chosen = [id_of(died), id_of(died), id_of(sent), "shop:99"]
    out, why = refused(action, *chosen, *more)
    assert out.startswith("1 message(s) are ")
    assert why == "2 of 3 message(s) are not there, or in no state for that."
    assert dead(alias) == set()


# Refusals and errors


ACTIONS = ("status", "list", "retry --all", "discard --all --no-input", "relay --once")


def test_no_outbox(broker: Celery, make_database: MakeDatabase, tmp_path: Path) -> None:
    """Without a database that has the table, each action fails and says what to run."""
    assert make_database  # the databases may be asked
    for action in ACTIONS:
        why = refused(*action.split())[1]
        assert why == "No database has the outbox. Run manage.py migrate."
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        why = refused("relay", "--once", "--database", "empty")[1]
        assert why.startswith("The database can't be asked: OperationalError: no such table: ")
        assert why.endswith("Was manage.py migrate run?")


def test_a_database_that_is_gone(broker: Celery, make_database: MakeDatabase) -> None:
    """A database that does not answer fails each action with 2, and is no empty outbox."""
    assert make_database
    with registered("gone", gone_settings()):
        for action in ACTIONS:
            out, why = refused(*action.split())
            assert why.startswith("The database can't be asked: OperationalError: ")
            assert out == "" or out.endswith("\nSent 0 message(s).\n")
        assert status_of_program("list") == 2


# relay --once


def test_relay_once_sends_what_is_due(
    alias: str, other: str, queue: Callable[[], list[str]], settings: Settings
) -> None:
    """relay --once sends what is due everywhere; receivers have the language of the project."""
    settings.LANGUAGE_CODE = "zh-hans"
    languages = []
    wanted = [leave(alias), leave(other), leave(other)]
    later, died = rows.leave(alias), leave_dead(alias)
    assert run("relay", "--once", "--database", alias).endswith("Sent 1 message(s).\n")
    with receiving(task_sent, lambda **fields: languages.append(get_language())):
        first, last = run("relay", "--once").splitlines()
    assert first.startswith("Relaying the outbox of shop, other to redis://")
    assert (last, languages) == ("Sent 2 message(s).", ["zh-hans"] * 2)
    assert queue() == [row.task_id for row in wanted]
    assert ids(alias) == {later.pk, died.pk}


def test_relay_once_without_a_broker(
    alias: str, queue: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """relay --once fails if the broker is gone; no message loses an attempt, and all stay due."""
    row = leave(alias)
    # Celery before 5.7 asks the settings first.
    with monkeypatch.context() as patch, override_settings(CELERY_BROKER_URL=NOBODY):
        patch.setitem(app_of_tests.conf, "broker_url", NOBODY)
        forget_first_use()
        out, why = refused("relay", "--once")
    forget_first_use()
    assert "OperationalError" in why
    assert "password" not in out + why
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
        row = leave(alias, add_task(app, name="tests.unnamed", base=None))
        run_all([Relay(alias)], stop, lambda: None)
    giving_up.cancel()
    assert sent_to(redis_server, 3) == [row.task_id]


# the file that a relay touches, for probes


def test_the_file_is_as_old_as_the_last_turn_of_each_relay(
    alias: str, other: str, tmp_path: Path
) -> None:
    """A relay that hangs lets the file grow old; one that can't be written ends the command."""
    path, relays = tmp_path / "relay", [Relay(alias), Relay(other)]
    with kept_heartbeat(str(path), relays) as touch:
        assert path.stat().st_mtime > LONG_AGO
        relays[0].turned_at, relays[1].turned_at = LONG_AGO + 5, LONG_AGO
        touch()
        assert path.stat().st_mtime == LONG_AGO
    assert not path.exists()
    with pytest.raises(FileNotFoundError, match="none/relay"):
        run("relay", "--heartbeat-file", str(tmp_path / "none" / "relay"))


# relay as a process


@pytest.mark.long
def test_a_relay_runs_until_it_is_stopped(alias: str, settings: Settings, tmp_path: Path) -> None:
    """A relay waits for its broker, sends what is there and what comes; a signal ends it with 0."""
    path = tmp_path / "heartbeat"
    command = [sys.executable, "-u", "-m", "django", "celery_outbox", "relay"]
    with RedisServer() as server:
        server.stop()
        settings.CELERY_BROKER_URL = server.database_url(1)
        before = leave(alias)
        with KeptProcess(
            [*command, "--heartbeat-file", str(path)],
            folder=ROOT,
            log_path=tmp_path / "relay.log",
            env={**os.environ, **settings_environment()},
        ) as relay:
            wait_for(lambda: "The broker can't be reached" in relay.log, PATIENCE)
            assert listed()[0]["attempts"] == 0
            assert path.exists()
            server.start()
            wait_for(lambda: sent_to(server) == [before.task_id], PATIENCE)
            after = leave(alias)
            wait_for(lambda: sent_to(server) == [before.task_id, after.task_id], PATIENCE)
            wait_for(lambda: ids(alias) == set(), PATIENCE)
            relay.process.send_signal(signal.SIGTERM)
            assert relay.wait(PATIENCE) == 0
    assert not path.exists()
    assert relay.log.endswith("Sent 2 message(s).\n")
    assert relay.log.count("can't be reached") == 1
    assert "Traceback" not in relay.log
