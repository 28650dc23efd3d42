"""manage.py celery_outbox: its output, its effects, and its exit status."""

import json
import os
import re
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
from celery import Celery, _state, current_app, signature
from django.core.management import CommandError
from django.db import connections, transaction
from django.test import override_settings
from django.test.utils import CaptureQueriesContext
from django.utils.translation import get_language
from pytest_django import Settings

from django_celery_safe import send_on_commit
from django_celery_safe.databases import Now
from django_celery_safe.leases.holder import Holder, encode_holder
from django_celery_safe.management.commands.celery_outbox import run_all
from django_celery_safe.models import OutboxMessage, OutboxRelay
from django_celery_safe.sending.relay import BATCH, Relay
from django_celery_safe.signals import task_sent
from tests import commands
from tests.app.celery import app as app_of_tests
from tests.app.tasks import add, note
from tests.conftest import MakeDatabase, UseBroker, require
from tests.processes import KeptProcess, wait_for
from tests.processes.settings import settings_environment
from tests.servers import PostgresServer, RedisServer, ServerPool
from tests.servers.databases import (
    DatabaseKind,
    Databases,
    gone_settings,
    registered,
    sqlite_settings,
)
from tests.terminal import answer, on_terminal

ROOT = Path(__file__).resolve().parent.parent

#: An argument that must show nowhere.
SECRET = "the-secret-of-the-argument"
#: Where no broker is.
NOBODY = "redis://:password@127.0.0.1:1/0"


run = partial(commands.run, "celery_outbox")
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
    settings.DATABASE_ROUTERS = [f"{__name__}.NotInDefault"]


@pytest.fixture
def alias(make_database: MakeDatabase) -> str:
    """The one database with an outbox."""
    return make_database("sqlite-immediate", "shop")


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
    what = signature(task, app=app_of_tests) if isinstance(task, str) else task.s(SECRET)
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


def test_status_of_an_empty_outbox(alias: str) -> None:
    """An outbox without messages, where no relay ever was, says so in both forms."""
    lines = run("status").splitlines()
    assert lines[0] == "shop"
    states = ["pending", "sent", "running", "done", "failed", "dead"]
    assert [line.split() for line in lines[1:7]] == [[state, "0"] for state in states]
    assert lines[7] == "  no relay has been seen yet"
    assert json.loads(run("status", "--json")) == {
        "shop": {
            **dict.fromkeys(states, 0),
            "oldest_s": None,
            "relay": None,
            "relay_seen_s": None,
        }
    }


def test_status_counts_by_state(alias: str, broker: Celery) -> None:
    """Pending, dead and sent messages are counted apart; the oldest is the oldest pending one."""
    leave(alias, age=30)
    leave(alias, due=False, age=90)
    leave_dead(alias)
    OutboxMessage.objects.using(alias).dead().update(created_at=Now() - timedelta(days=9))
    for _ in range(3):
        leave_sent(alias)
    pending, sent, _, _, _, died = run("status").splitlines()[1:7]
    assert pending.split() == ["pending", "2,", "the", "oldest", "for", pending.split()[-1]]
    assert re.fullmatch(r"(9|1\d)\d\.\ds", pending.split()[-1])
    assert died.split() == ["dead", "1"]
    assert sent.split() == ["sent", "3"]
    row = json.loads(run("status", "--json"))["shop"]
    assert (row["pending"], row["dead"], row["sent"]) == (2, 1, 3)
    assert 90 <= row["oldest_s"] < 150


def test_status_names_the_last_relay(alias: str, queue: Callable[[], list[str]]) -> None:
    """The last relay is named, with the time since then by the database's clock."""
    run("relay", "--once")
    OutboxRelay.objects.using(alias).update(host="web\x1b[1m1", seen_at=Now() - timedelta(hours=3))
    assert f"3h ago (web\\x1b[1m1 pid {os.getpid()})" in " ".join(run("status").split())
    row = json.loads(run("status", "--json"))["shop"]
    assert row["relay"] == f"web\x1b[1m1 pid {os.getpid()}"
    assert 3 * 3600 <= row["relay_seen_s"] < 3 * 3600 + 60


@pytest.mark.parametrize(
    ("age", "limit", "status"), [(120, "60", 1), (30, "60", 0), (30, "0", 1), (3, "2.5", 1)]
)
def test_the_age_decides_the_exit_status(
    alias: str,
    broker: Celery,
    capsys: pytest.CaptureFixture[str],
    age: int,
    limit: str,
    status: int,
) -> None:
    """status --max-age exits with 1 if a message waits for longer; the figures come either way."""
    leave(alias, age=age)
    for form in ([], ["--json"]):
        assert status_of_program("status", "--max-age", limit, *form) == status
        out, err = capsys.readouterr()
        assert "pending" in out
        assert ("A message has been waiting" in err) is bool(status)
    assert json.loads(out)["shop"]["pending"] == 1


def test_only_what_waits_has_an_age(alias: str, broker: Celery) -> None:
    """A dead or sent message, however old, is none that waits too long; nor is an empty outbox."""
    run("status", "--max-age", "0")
    leave_dead(alias)
    leave_sent(alias)
    OutboxMessage.objects.using(alias).update(created_at=Now() - timedelta(days=1))
    assert "dead           1" in run("status", "--max-age", "0")


def test_the_oldest_of_all_databases_counts(alias: str, make_database: MakeDatabase) -> None:
    """--max-age looks at all outboxes, or at those that --database names."""
    make_database("sqlite", "other")
    leave("other", age=500)
    assert run("status", "--max-age", "60", "--database", alias).startswith("shop\n")
    out, why = refused("status", "--max-age", "60")
    assert headings(out) == ["shop", "other"]
    assert "longer than --max-age 60." in why
    assert list(json.loads(run("status", "--json"))) == ["shop", "other"]


def test_an_age_that_is_none_is_refused(alias: str, broker: Celery) -> None:
    """--max-age has to be a time."""
    leave(alias, age=500)
    for text in ("nan", "-1", "inf", "1e300", "soon"):
        why = refused("status", f"--max-age={text}")[1]
        assert why.startswith(
            f"Error: argument --max-age: '{text}' is not a valid time; write 90 or 90s"
        )


# list


def test_list_of_an_empty_outbox(alias: str) -> None:
    """An empty outbox says so; JSON is an empty list; a choice that meets nothing says that."""
    assert run("list") == "The outbox is empty.\n"
    assert json.loads(run("list", "--json")) == []
    assert run("list", "--state", "dead") == run("list", "--task", "x") == "No such message.\n"


def test_list_shows_each_message(alias: str, broker: Celery) -> None:
    """A message has its id, task, task id, state and age, and what was wrong if it failed."""
    waits, died = leave(alias, age=300), leave_dead(alias, note, "the queue is full")
    first, details, second, more, failed, error = run("list").splitlines()
    assert first.split() == [str(waits.pk), "tests.app.tasks.add"]
    assert details.split() == ["pending,", "5min", "old,", waits.task_id]
    assert second.split() == [str(died.pk), "tests.app.tasks.note"]
    assert (more.split()[0], more.split()[-1]) == ("dead,", died.task_id)
    assert failed.strip() == "1 failed attempt(s)"
    assert error.strip() == "the queue is full"


def test_no_body_is_read_that_is_not_shown(alias: str, broker: Celery) -> None:
    """The list and the status take as little memory as they show, however large messages are."""
    leave(alias)
    with CaptureQueriesContext(connections[alias]) as queries:
        run("list")
        run("status")
    assert queries.captured_queries
    assert not [query for query in queries.captured_queries if '"body"' in query["sql"]]


def test_list_as_json(alias: str, broker: Celery) -> None:
    """--json has an object for each message, with ages in seconds and the state by name."""
    waits, died, sent = leave(alias, due=False, age=50), leave_dead(alias), leave_sent(alias)
    rows = json.loads(run("list", "--json"))
    assert [row["id"] for row in rows] == [waits.pk, died.pk, sent.pk]
    assert [row["state"] for row in rows] == ["pending", "dead", "sent"]
    assert [row["due_in_s"] is None for row in rows] == [False, True, True]
    assert 0 < rows[0]["due_in_s"] < 30
    assert 50 <= rows[0]["age_s"] < 110
    assert rows[1] == {
        "id": died.pk,
        "database": "shop",
        "state": "dead",
        "task": "tests.app.tasks.add",
        "task_id": died.task_id,
        "age_s": rows[1]["age_s"],
        "due_in_s": None,
        "attempts": 1,
        "starts": 0,
        "deaths": 0,
        "error_type": "",
        "error": "refused",
    }


def test_show_has_all_of_a_message(alias: str, broker: Celery) -> None:
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
    lines = dict(line.strip().split(maxsplit=1) for line in printed.split("\n\n")[0].splitlines())
    assert (lines["state"], lines["process"]) == ("failed", "process 42 on web1")
    assert lines["error"].endswith("no such order")
    assert printed.endswith("\nTraceback:\n  in \\x1b[1mcharge\nValueError: no such order\n")
    found = json.loads(run("show", str(message.pk), "--json"))
    assert (found["state"], found["error_type"], found["deaths"]) == ("failed", "ValueError", 0)
    assert found["traceback"].splitlines()[1] == "  in \x1b[1mcharge"
    with pytest.raises(CommandError, match="There is no message 99 in the outbox of 'shop'"):
        run("show", "99")


@pytest.mark.parametrize("state", ["pending", "dead", "sent"])
def test_list_by_state(alias: str, broker: Celery, state: str) -> None:
    """--state shows only the messages in this state."""
    rows = {"pending": leave(alias), "dead": leave_dead(alias), "sent": leave_sent(alias)}
    (row,) = json.loads(run("list", "--json", "--state", state))
    assert (row["id"], row["state"]) == (rows[state].pk, state)


def test_list_by_task(alias: str, broker: Celery) -> None:
    """--task shows only the messages of this task, together with --state only those in it."""
    row, died = leave(alias, note), leave_dead(alias, note)
    leave(alias)
    listed = json.loads(run("list", "--json", "--task", note.name))
    assert [one["id"] for one in listed] == [row.pk, died.pk]
    listed = json.loads(run("list", "--json", "--task", note.name, "--state", "dead"))
    assert [one["id"] for one in listed] == [died.pk]


def test_list_is_limited(alias: str, broker: Celery) -> None:
    """--limit shows the oldest ones and says if there are more; 0 shows all."""
    for _ in range(4):
        leave(alias)
    assert [row["id"] for row in json.loads(run("list", "--json", "--limit", "2"))] == [1, 2]
    assert run("list", "--limit", "2").endswith("There are more: --limit is 2.\n")
    for arguments in ([], ["--limit", "4"], ["--limit", "0"]):
        assert "There are more" not in run("list", *arguments)
    assert len(json.loads(run("list", "--json", "--limit", "0"))) == 4
    copy(leave(alias), 60)
    assert len(json.loads(run("list", "--json"))) == 50
    assert len(json.loads(run("list", "--json", "--limit", "0"))) == 65


def test_a_negative_limit_is_refused(alias: str) -> None:
    """--limit has to be a number of messages."""
    for text in ("-1", "1.5", "many"):
        why = refused("list", f"--limit={text}")[1]
        assert why == f"Error: argument --limit: '{text}' is not a whole number from 0 on"


def test_list_of_several_databases(alias: str, make_database: MakeDatabase) -> None:
    """Messages of all databases are listed, and JSON names the database of each."""
    make_database("sqlite", "other")
    leave(alias)
    leave("other", note)
    rows = json.loads(run("list", "--json"))
    assert [(row["database"], row["task"]) for row in rows] == [
        ("shop", add.name),
        ("other", note.name),
    ]
    assert note.name not in run("list", "--database", alias)


def test_the_text_names_the_database_where_there_are_several(
    alias: str, make_database: MakeDatabase
) -> None:
    """An id that is only good with --database is shown with its database."""
    make_database("sqlite", "other")
    rows = [leave(alias), leave("other")]
    first, second = (f"{row.pk}  {row.task}" for row in rows)
    assert headings(run("list")) == ["shop", first, "other", second]
    assert headings(run("list", "--database", "other")) == [second]


def test_the_limit_is_of_all_databases(alias: str, make_database: MakeDatabase) -> None:
    """--limit is how many messages are shown at most, over all databases."""
    make_database("sqlite", "other")
    for _ in range(3):
        leave(alias)
        leave("other")
    assert len(json.loads(run("list", "--json", "--limit", "2"))) == 2
    assert run("list", "--limit", "2").endswith("There are more: --limit is 2.\n")


def test_names_can_not_steer_the_terminal(alias: str, broker: Celery) -> None:
    """Control characters in a task's name, its id or an error are printed as escapes."""
    name = "shop.\x1b[31mred\n\x9b"
    row = leave(alias, name)
    OutboxMessage.objects.using(alias).update(task_id="\x1b[2J\r")
    row.fail("\x1b]0;title\x07\nsecond line", attempts=1)
    output = run("list")
    assert "shop.\\x1b[31mred\\n\\x9b" in output
    assert "\\x1b[2J\\r" in output
    assert "\\x1b]0;title\\x07\\nsecond line" in output
    for text in (output, run("list", "--json"), run("list", "--task", name), run("status")):
        assert all(char.isprintable() for char in text.replace("\n", ""))
    assert json.loads(run("list", "--json"))[0]["task"] == name
    assert len(json.loads(run("list", "--json", "--task", name))) == 1


def test_a_message_fits_80_columns(alias: str, broker: Celery) -> None:
    """A task's name and id, its state and a long error fit a terminal of 80 columns."""
    leave(alias, note, age=99)
    leave_dead(alias, error=f"OperationalError: {'the queue is full, ' * 30}{'x' * 200}")
    OutboxMessage.objects.using(alias).update(attempts=0)
    assert max(map(len, run("list").splitlines())) <= 80


def test_a_message_that_failed_fits_80_columns(alias: str, broker: Celery) -> None:
    """How often a message failed leaves the line within 80 columns."""
    row = leave(alias, age=99)
    row.attempts = 18
    assert not row.fail("refused", attempts=20)
    lines = run("list").splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[2] == "    19 failed attempt(s), due in 10min"


def test_no_argument_shows(
    alias: str, queue: Callable[[], list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """No action prints or logs the value of an argument, in either form."""
    caplog.set_level("DEBUG", "django_celery_safe")
    row = leave(alias)
    assert not row.fail("refused", attempts=2)
    died = leave_dead(alias)
    broken = leave(alias)
    OutboxMessage.objects.using(alias).filter(pk=broken.pk).update(properties="{}")
    leave_sent(alias)
    outputs = [
        run(*arguments.split())
        for arguments in (
            "status",
            "status --json",
            "list",
            "list --json",
            f"retry {row.pk}",
            f"discard {row.pk} --dry-run",
            "prune --dry-run",
            "relay --once",
            "list --json --limit 0",
            f"discard {died.pk} --no-input",
        )
    ]
    assert SECRET in repr(bytes(died.body))
    assert SECRET not in "".join([*outputs, caplog.text])
    assert queue() == [row.task_id]


# retry, discard


def test_retry_lets_a_dead_message_be_sent(alias: str, queue: Callable[[], list[str]]) -> None:
    """A dead message that is retried has all its attempts again, and the next relay sends it."""
    died, other = leave_dead(alias), leave_dead(alias)
    assert run("retry", str(died.pk)) == "1 message(s) are due now.\n"
    row = OutboxMessage.objects.using(alias).get(pk=died.pk)
    assert (row.attempts, row.dead_at) == (0, None)
    assert dead(alias) == {other.pk}
    assert run("relay", "--once").endswith("Sent 1 message(s).\n")
    assert queue() == [died.task_id]


def test_receivers_in_a_relay_have_the_language_of_the_project(
    alias: str, queue: Callable[[], list[str]], settings: Settings
) -> None:
    """A relay prints English, and a receiver's e-mail is in the language of the project."""
    settings.LANGUAGE_CODE = "zh-hans"
    languages = []

    def hear(**fields: Any) -> None:
        languages.append(get_language())

    leave(alias)
    task_sent.connect(hear)
    try:
        assert run("relay", "--once").endswith("Sent 1 message(s).\n")
    finally:
        task_sent.disconnect(hear)
    assert languages == ["zh-hans"]


def test_retry_of_what_waits_makes_it_due(alias: str, queue: Callable[[], list[str]]) -> None:
    """A message that waits for its next attempt is tried at once."""
    row = leave(alias)
    assert not row.fail("refused", attempts=20)
    run("relay", "--once")
    assert queue() == []
    run("retry", str(row.pk))
    run("relay", "--once")
    assert queue() == [row.task_id]


def test_retry_leaves_alone_what_did_not_fail(alias: str, broker: Celery) -> None:
    """A message that its sender may still be sending is not there to be retried."""
    row = leave(alias, due=False)
    out, why = refused("retry", str(row.pk))
    assert out == "0 message(s) are due now.\n"
    assert why.startswith("1 of 1 message(s) are not there, or not in a state for that.")
    assert OutboxMessage.objects.using(alias).get(pk=row.pk).due_at == row.due_at


def test_discard_deletes(alias: str, queue: Callable[[], list[str]]) -> None:
    """A discarded message, dead or waiting, is gone and never sent; others stay."""
    died, waits, other = leave_dead(alias), leave(alias), leave(alias)
    pks = [str(died.pk), str(waits.pk)]
    assert run("discard", "--no-input", *pks) == "2 message(s) were deleted.\n"
    assert ids(alias) == {other.pk}
    run("relay", "--once")
    assert queue() == [other.task_id]


def test_discard_asks(make_database: MakeDatabase, broker: Celery) -> None:
    """discard shows what it is about; only yes is yes, and what dies meanwhile stays."""
    alias = make_database("sqlite-immediate", "shop")
    died = {leave_dead(alias).pk for _ in range(22)}
    out, why = refused("discard", "--all")
    assert out == ""
    assert "there is no terminal to ask at: nothing was done. Add --no-input" in why
    for text in ("no\n", "y\n", "\x04"):
        told, said = answer(text, "celery_outbox", "discard", str(min(died)))
        assert "\nDiscard 1 message(s)? [yes/no] " in told
        assert (text, said) == (text, "The answer was not 'yes': nothing was done.")
    with on_terminal("celery_outbox", "discard", "--all") as terminal:
        terminal.wait_for("[yes/no] ")
        assert terminal.text.count(f"  {add.name}\n") == 20
        assert terminal.text.endswith(
            "\n... and 2 more.\n"
            "These messages are deleted, and their tasks never run. This can't be undone.\n"
            "Discard 22 message(s)? [yes/no] "
        )
        assert dead(alias) == died
        later = leave_dead(alias)
        terminal.type("yes\n")
        assert terminal.end() == 0
        assert terminal.text.endswith("\n22 message(s) were deleted.\n")
    assert dead(alias) == {later.pk}
    assert run("discard", "--all", "--task", "unknown") == "0 message(s) were deleted.\n"


@pytest.mark.parametrize(
    ("action", "would", "did"),
    [
        ("retry", "would be due now", "are due now"),
        ("discard --no-input", "would be deleted", "were deleted"),
    ],
)
def test_all_are_the_dead(alias: str, broker: Celery, action: str, would: str, did: str) -> None:
    """--all means every dead message, --task only those of one task; --dry-run changes nothing."""
    waits, sent, failed = leave(alias), leave_sent(alias), leave(alias)
    failed.fail("refused", attempts=2)
    notes = {leave_dead(alias, note).pk for _ in range(2)}
    died = leave_dead(alias).pk
    before = {row.pk: row.due_at for row in OutboxMessage.objects.using(alias).all()}

    for arguments, number in (
        (["--all"], 3),
        (["--all", "--task", note.name], 2),
        (["--all", "--task", "unknown"], 0),
        ([str(failed.pk), str(died)], 2),
    ):
        output = run(*action.split(), *arguments, "--dry-run")
        assert output == f"{number} message(s) {would}.\n"
    after = {row.pk: row.due_at for row in OutboxMessage.objects.using(alias).all()}
    assert (after, dead(alias)) == (before, {died, *notes})

    assert run(*action.split(), "--all", "--task", note.name) == f"2 message(s) {did}.\n"
    assert dead(alias) == {died}
    assert run(*action.split(), "--all") == f"1 message(s) {did}.\n"
    assert dead(alias) == set()
    others = {waits.pk, sent.pk, failed.pk}
    assert ids(alias) == (others if action != "retry" else set(before))
    for row in OutboxMessage.objects.using(alias).filter(pk__in=others):
        assert row.due_at == before[row.pk]
    assert run(*action.split(), "--all") == f"0 message(s) {did}.\n"


@pytest.mark.parametrize("action", ["retry", "discard --no-input"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_ids_that_are_not_there(alias: str, broker: Celery, action: str, dry: list[str]) -> None:
    """Unknown ids, and those that were sent, are counted and fail the command; others are done."""
    died, sent = leave_dead(alias), leave_sent(alias)
    out, why = refused(*action.split(), str(died.pk), str(died.pk), str(sent.pk), "999", *dry)
    assert out.startswith("1 message(s) ")
    assert why.startswith("2 of 3 message(s) are not there, or not in a state for that.")
    assert dead(alias) == ({died.pk} if dry else set())
    assert sent.pk in ids(alias)


@pytest.mark.parametrize("action", ["retry", "discard"])
def test_a_choice_has_to_be_made(
    alias: str, broker: Celery, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """Neither ids nor --all, both, --task without --all, and no number are refused."""
    died = leave_dead(alias)
    pk = str(died.pk)
    assert "Give the IDs" in refused(action)[1]
    assert "Give the IDs" in refused(action, pk, "--all")[1]
    assert "Give the IDs" in refused(action, "--task", add.name)[1]
    assert "--task goes with --all" in refused(action, pk, "--task", add.name)[1]
    assert status_of_program(action, "one") == 2
    assert "'one' is not a whole number from 0 on" in capsys.readouterr().err
    assert dead(alias) == {died.pk}


def test_an_id_that_no_row_can_have(alias: str) -> None:
    """A number that is too large for an id is refused; the largest that is one is not there."""
    assert "is not a whole number from 0 on" in refused("retry", "9" * 30)[1]
    assert "not there" in refused("retry", str(2**63 - 1))[1]


@pytest.mark.parametrize("action", ["retry", "discard --no-input"])
def test_ids_need_their_database(alias: str, make_database: MakeDatabase, action: str) -> None:
    """Where there are several outboxes, ids are refused without --database; --all is of all."""
    make_database("sqlite", "other")
    one, two = leave_dead(alias), leave_dead("other")
    assert one.pk == two.pk
    why = refused(*action.split(), str(one.pk))[1]
    assert "shop and other" in why
    assert "--database" in why
    assert dead(alias) == dead("other") == {one.pk}
    run(*action.split(), str(one.pk), "--database", "other")
    assert (dead(alias), dead("other")) == ({one.pk}, set())
    leave_dead("other")
    assert run(*action.split(), "--all").startswith("2 message(s) ")
    assert dead(alias) == dead("other") == set()


# prune


def test_prune_goes_by_age(alias: str, broker: Celery, settings: Settings) -> None:
    """prune deletes what was sent before OUTBOX_RETENTION, or --older-than, and nothing else."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_RETENTION": 3600}
    old, young, oldest = leave_sent(alias, 4000), leave_sent(alias, 60), leave_sent(alias, 9999)
    others = {leave(alias).pk, leave_dead(alias).pk}
    OutboxMessage.objects.using(alias).update(created_at=Now() - timedelta(days=9))
    assert run("prune", "--dry-run") == "2 sent message(s) would be deleted.\n"
    assert run("prune", "--older-than", "5000") == "1 sent message(s) were deleted.\n"
    assert ids(alias) == {old.pk, young.pk, *others}
    assert run("prune") == "1 sent message(s) were deleted.\n"
    assert ids(alias) == {young.pk, *others}
    assert run("prune", "--older-than", "0", "--dry-run").startswith("1 sent")
    assert run("prune", "--older-than", "0").startswith("1 sent")
    assert ids(alias) == others
    assert oldest.pk not in ids(alias)


def test_prune_of_several_databases(alias: str, make_database: MakeDatabase) -> None:
    """prune deletes in all outboxes, or in that which is named."""
    make_database("sqlite", "other")
    for name in (alias, alias, "other"):
        leave_sent(name, 60)
    assert run("prune", "--dry-run").startswith("3 sent")
    assert run("prune", "--database", "other").startswith("1 sent")
    assert run("prune").startswith("2 sent")


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "1e300"])
def test_an_age_to_prune_that_is_none(alias: str, broker: Celery, seconds: str) -> None:
    """--older-than has to be a time that a date can be away."""
    leave_sent(alias)
    assert "is not a valid time" in refused("prune", f"--older-than={seconds}")[1]
    assert len(ids(alias)) == 1


# Refusals and errors


ACTIONS = ("status", "list", "retry --all", "discard --all", "prune", "relay --once")


@pytest.mark.parametrize("action", ACTIONS)
def test_no_outbox(
    settings: Settings,
    broker: Celery,
    make_database: MakeDatabase,
    capsys: pytest.CaptureFixture[str],
    action: str,
) -> None:
    """Without a database that has the table, each action fails and says what to run."""
    assert make_database  # the databases may be asked
    assert status_of_program(*action.split()) == 1
    assert capsys.readouterr().err == (
        "CommandError: No database has the outbox. Run manage.py migrate.\n"
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_a_database_without_the_table(
    make_database: MakeDatabase, broker: Celery, tmp_path: Path, action: str
) -> None:
    """A database that is named and has no table is an error that names both."""
    assert make_database
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        why = refused(*action.split(), "--database", "empty")[1]
    assert why.startswith("The database 'empty' has no table for the outbox (")
    assert "django_celery_safe_outbox" in why
    assert why.endswith("). Run manage.py migrate --database=empty.")


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_a_missing_table_hints_at_migrate(
    make_database: MakeDatabase, broker: Celery, kind: DatabaseKind
) -> None:
    """Where the tables are missing, each action says what to run, and for which database."""
    make_database(kind, "shop")
    with connections["shop"].schema_editor() as editor:
        editor.delete_model(OutboxMessage)
        editor.delete_model(OutboxRelay)
    for action in ACTIONS:
        why = refused(*action.split(), "--database", "shop")[1]
        assert why.startswith("The database 'shop' has no table for the outbox (")
        assert why.endswith("). Run manage.py migrate --database=shop.")


@pytest.mark.parametrize("action", ACTIONS)
def test_a_database_that_is_gone(
    make_database: MakeDatabase, broker: Celery, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """A database that does not answer fails each action, and is no empty outbox."""
    assert make_database
    with registered("gone", gone_settings()):
        assert status_of_program(*action.split()) == 1
    out, err = capsys.readouterr()
    assert err.startswith("CommandError: The database can't be asked, of gone: OperationalError: ")
    if action == "relay --once":
        assert out.startswith("Relaying the outbox of gone to ")
        assert out.endswith("\nSent 0 message(s).\n")
    else:
        assert out == ""


def test_a_database_without_autocommit(alias: str, queue: Callable[[], list[str]]) -> None:
    """A relay's changes would not be committed there, so it refuses, and sends nothing."""
    row = leave(alias)
    with registered("manual", {**connections.settings[alias], "AUTOCOMMIT": False}):
        for arguments in ([], ["--database", "shop", "--database", "manual"]):
            why = refused("relay", "--once", *arguments)[1]
            assert why.startswith("The database 'manual' has AUTOCOMMIT off")
            assert "--database=ALIAS" in why
        assert queue() == []
        assert run("relay", "--once", "--database", "shop").endswith("Sent 1 message(s).\n")
    assert queue() == [row.task_id]


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_is_done_without_autocommit(alias: str, broker: Celery, action: str) -> None:
    """Each action refuses a database in which nothing that it does would be committed."""
    row = leave(alias)
    with registered("manual", {**connections.settings[alias], "AUTOCOMMIT": False}):
        why = refused(*action.split(), "--database", "manual")[1]
    assert why.startswith("The database 'manual' has AUTOCOMMIT off")
    assert ids(alias) == {row.pk}


@pytest.mark.parametrize("action", ACTIONS)
def test_an_unknown_database(alias: str, action: str) -> None:
    """An alias that DATABASES does not have is refused with those that it has."""
    why = refused(*action.split(), "--database", "nope")[1]
    assert why == "DATABASES has no 'nope'; it has default, shop."
    assert "nope" in refused("--database", "nope", *action.split())[1]


def test_a_setting_that_means_nothing(alias: str, broker: Celery, settings: Settings) -> None:
    """A retention that can't be used fails prune and relay with its name."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_RETENTION": "a week"}
    for arguments in (["prune"], ["relay", "--once"]):
        assert "OUTBOX_RETENTION='a week'" in refused(*arguments)[1]


@pytest.mark.parametrize("action", ["", *[action.split()[0] for action in ACTIONS]])
def test_help_reads_well(capsys: pytest.CaptureFixture[str], action: str) -> None:
    """--help names the actions, and for each one what it does."""
    commands.check_help(
        "celery_outbox", action, "{relay,status,list,show,retry,discard,prune}", capsys
    )


# relay --once


def test_relay_once_sends_what_is_due(alias: str, queue: Callable[[], list[str]]) -> None:
    """relay --once says where it sends to, sends what is due and leaves the rest."""
    rows = [leave(alias) for _ in range(3)]
    later, died = leave(alias, due=False), leave_dead(alias)
    first, last = run("relay", "--once").splitlines()
    assert first.startswith("Relaying the outbox of shop to redis://")
    assert last == "Sent 3 message(s)."
    assert queue() == [row.task_id for row in rows]
    assert ids(alias) == {later.pk, died.pk}
    assert run("relay", "--once").endswith("Sent 0 message(s).\n")


def test_relay_once_sends_more_than_a_batch(alias: str, queue: Callable[[], list[str]]) -> None:
    """relay --once goes on until nothing is due, and deletes what it sent."""
    copy(leave(alias), 2 * BATCH)
    assert run("relay", "--once").endswith(f"Sent {2 * BATCH + 1} message(s).\n")
    assert len(queue()) == 2 * BATCH + 1
    assert ids(alias) == set()


def test_relay_keeps_what_it_sent(
    alias: str, queue: Callable[[], list[str]], settings: Settings
) -> None:
    """With OUTBOX_RETENTION what was sent stays and is listed as sent, with no error."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_RETENTION": 3600}
    row = leave(alias)
    row.fail("refused", attempts=2)
    run("retry", str(row.pk))
    run("relay", "--once")
    (listed,) = json.loads(run("list", "--json"))
    assert (listed["state"], listed["error"], listed["due_in_s"]) == ("sent", "", None)
    assert run("relay", "--once").endswith("Sent 0 message(s).\n")
    assert queue() == [row.task_id]


def test_relay_once_of_several_databases(
    alias: str, make_database: MakeDatabase, queue: Callable[[], list[str]]
) -> None:
    """relay --once sends from all outboxes, or from those that are named."""
    make_database("sqlite", "other")
    one, two, three = leave(alias), leave("other"), leave("other")
    assert run("relay", "--once", "--database", alias).endswith("Sent 1 message(s).\n")
    assert run("relay", "--once").endswith("Sent 2 message(s).\n")
    assert queue() == [one.task_id, two.task_id, three.task_id]
    leave(alias)
    leave("other")
    both = run("relay", "--database", alias, "--once", "--database", "other")
    assert both.startswith("Relaying the outbox of shop, other to ")
    assert both.endswith("Sent 2 message(s).\n")


def test_relay_once_without_a_broker(
    alias: str, queue: Callable[[], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """relay --once fails if the broker is gone; no message loses an attempt, and all stay due."""
    row = leave(alias)
    with broker_at(NOBODY):
        assert status_of_program("relay", "--once") == 1
    out, err = capsys.readouterr()
    assert "OperationalError" in err
    assert "password" not in out + err
    (listed,) = json.loads(run("list", "--json"))
    assert (listed["state"], listed["attempts"], listed["error"]) == ("pending", 0, "")
    assert listed["due_in_s"] <= 0
    run("relay", "--once")
    assert queue() == [row.task_id]


def test_relay_with_a_broker_that_means_nothing(alias: str, broker: Celery) -> None:
    """A broker's URL that kombu does not know is an error with a sentence, no traceback."""
    row = leave(alias)
    with broker_at("nope://127.0.0.1"):
        why = refused("relay", "--once")[1]
    assert why.startswith("broker_url names an unknown transport")
    assert OutboxMessage.objects.using(alias).get().attempts == row.attempts == 0


def test_relay_sets_a_poisoned_message_aside(alias: str, queue: Callable[[], list[str]]) -> None:
    """A row that makes no message is listed with what was wrong, and the others are sent."""
    broken, good = leave(alias), leave(alias)
    OutboxMessage.objects.using(alias).filter(pk=broken.pk).update(properties="{")
    assert run("relay", "--once").endswith("Sent 1 message(s).\n")
    assert queue() == [good.task_id]
    (listed,) = json.loads(run("list", "--json"))
    assert (listed["id"], listed["state"], listed["attempts"]) == (broken.pk, "pending", 1)
    assert "the row makes no message" in listed["error"]


# relay, in threads


@contextmanager
def unnamed_apps(*brokers: str) -> Iterator[list[Celery]]:
    """Have apps without a name; the first is this thread's current one, the last all others'."""
    before, default = current_app._get_current_object(), _state.default_app
    apps = [Celery(broker=broker, set_as_current=False) for broker in brokers]
    apps[0].set_current()
    apps[-1].set_default()
    try:
        yield apps
    finally:
        before.set_current()
        _state.set_default_app(default)
        for app in apps:
            app.close()


def test_a_thread_relays_for_the_current_app_of_the_command(
    alias: str, make_database: MakeDatabase, redis_server: RedisServer, broker: Celery
) -> None:
    """Rows of an app without a name go to its own broker, though threads have another app."""
    aliases = [alias, make_database("sqlite-immediate", "other")]
    stop, told = threading.Event(), []

    def hear(**said: Any) -> None:
        told.append(said["task_id"])
        if len(told) == len(aliases):
            stop.set()

    giving_up = threading.Timer(30, stop.set)
    task_sent.connect(hear, weak=False)
    try:
        giving_up.start()
        with unnamed_apps(*map(redis_server.database_url, (3, 4))) as (own, _):
            wanted = {leave(name, own.tasks[add.name]).task_id for name in aliases}
            run_all([Relay(name) for name in aliases], stop)
    finally:
        giving_up.cancel()
        task_sent.disconnect(hear)
    assert set(told) == set(sent_to(redis_server, 3)) == wanted
    assert sent_to(redis_server, 4) == []


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
        return self.process.wait(30)


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


def is_relayed(alias: str) -> bool:
    """Tell whether a relay was here."""
    return OutboxRelay.objects.using(alias).exists()


def claimed(alias: str) -> int:
    """Return how many rows a relay has taken."""
    rows = OutboxMessage.objects.using(alias).pending()
    return rows.filter(due_at__gt=Now() + timedelta(seconds=30)).count()


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_relay_runs_until_it_is_stopped(
    alias: str, queue: Callable[[], list[str]], tmp_path: Path, number: signal.Signals
) -> None:
    """A relay sends what is there and what comes, and a signal ends it with status 0."""
    before = leave(alias)
    with relaying(tmp_path) as relay:
        wait_for(lambda: queue() == [before.task_id], 30)
        after = leave(alias)
        wait_for(lambda: queue() == [before.task_id, after.task_id], 30)
        wait_for(lambda: ids(alias) == set(), 30)
        assert relay.end(number) == 0
    assert relay.log.startswith("Relaying the outbox of shop to redis://")
    assert relay.log.endswith("Sent 2 message(s).\n")
    assert "Traceback" not in relay.log


@contextmanager
def stuck_in_a_batch(folder: Path, alias: str) -> Iterator[tuple[RelayProcess, RedisServer]]:
    """Have a relay whose broker fell silent when it had claimed a batch, with half as many left."""
    with (
        RedisServer() as server,
        override_settings(CELERY_BROKER_URL=server.database_url(1)),
        relaying(folder) as relay,
    ):
        first = leave(alias)
        wait_for(lambda: sent_to(server) == [first.task_id], 30)
        wait_for(lambda: ids(alias) == set(), 30)
        server.pause()
        try:
            # In one transaction: a relay that looks meanwhile would get a smaller batch.
            with transaction.atomic(using=alias):
                copy(leave(alias), BATCH + BATCH // 2 - 1)
            wait_for(lambda: claimed(alias) == BATCH, 30)
            yield relay, server
        finally:
            server.resume()


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGINT]
)
def test_the_batch_under_way_is_finished(
    postgres_alias: str, broker: Celery, tmp_path: Path, number: signal.Signals
) -> None:
    """A signal in the middle of a batch lets it be sent, all of it, and nothing more."""
    with stuck_in_a_batch(tmp_path, postgres_alias) as (relay, server):
        relay.send(number)
        with pytest.raises(TimeoutError):
            wait_for(lambda: not relay.process.running, 1)
        server.resume()
        assert relay.process.wait(30) == 0
        assert len(sent_to(server)) == 1 + BATCH
        assert len(ids(postgres_alias)) == BATCH // 2
        assert claimed(postgres_alias) == 0
        assert relay.log.endswith(f"Sent {1 + BATCH} message(s).\n")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(signal.SIGTERM, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(signal.SIGINT, signal.SIGINT, marks=pytest.mark.long),
        (signal.SIGTERM, signal.SIGINT),
    ],
)
def test_the_second_signal_ends_it_at_once(
    postgres_alias: str,
    broker: Celery,
    tmp_path: Path,
    first: signal.Signals,
    second: signal.Signals,
) -> None:
    """A second signal ends it without the batch, whose rows are left to other relays."""
    with stuck_in_a_batch(tmp_path, postgres_alias) as (relay, _):
        relay.send(first)
        with pytest.raises(TimeoutError):
            wait_for(lambda: not relay.process.running, 1)
        relay.send(second)
        assert relay.process.wait(30) != 0  # and after the batch it would be 0
        assert len(ids(postgres_alias)) == BATCH + BATCH // 2


def test_a_relay_of_two_databases(
    alias: str, postgres_alias: str, queue: Callable[[], list[str]], tmp_path: Path
) -> None:
    """One process relays all outboxes, side by side, and notes that it is there in each."""
    with relaying(tmp_path) as relay:
        rows = [leave(name) for name in (alias, postgres_alias, alias, postgres_alias)]
        wait_for(lambda: set(queue()) == {row.task_id for row in rows}, 30)
        wait_for(lambda: not ids(alias) and not ids(postgres_alias), 30)
        assert is_relayed(alias)
        assert is_relayed(postgres_alias)
        assert relay.end() == 0
    assert relay.log.startswith(f"Relaying the outbox of shop, {postgres_alias} to redis://")
    assert len(queue()) == 4
    assert relay.log.endswith("Sent 4 message(s).\n")


def test_a_relay_waits_for_its_broker(
    alias: str, use_broker: UseBroker, settings: Settings, tmp_path: Path
) -> None:
    """A relay that starts before its broker says so once, and sends when the broker is there."""
    use_broker()
    with RedisServer() as server:
        server.stop()
        settings.CELERY_BROKER_URL = server.database_url(1)
        row = leave(alias)
        with relaying(tmp_path) as relay:
            wait_for(lambda: "The broker can't be reached" in relay.log, 30)
            assert json.loads(run("list", "--json"))[0]["attempts"] == 0
            server.start()
            wait_for(lambda: sent_to(server) == [row.task_id], 30)
            wait_for(lambda: "is relayed again" in relay.log, 30)
            assert relay.end() == 0
    assert relay.log.count("can't be reached") == 1
    assert "Traceback" not in relay.log


@pytest.mark.long
def test_a_relay_waits_for_its_database(
    queue: Callable[[], list[str]], tmp_path: Path, make_database: MakeDatabase
) -> None:
    """A relay that starts before its database says so once, and sends when that is there."""
    assert make_database  # the databases may be asked
    with ServerPool() as servers:
        server: PostgresServer = require(servers, PostgresServer)
        with Databases(servers, tmp_path).alias("postgres", tmp_path, "late"):
            row = leave("late")
            connections["late"].close()
            server.stop()
            with relaying(tmp_path) as relay:
                wait_for(lambda: "The database can't be reached" in relay.log, 30)
                server.start()
                wait_for(lambda: queue() == [row.task_id], 30)
                wait_for(lambda: ids("late") == set(), 30)
                assert relay.end() == 0
    assert relay.log.count("can't be reached") == 1
    assert "Traceback" not in relay.log


def test_a_relay_that_waits_can_be_stopped(
    alias: str, broker: Celery, settings: Settings, tmp_path: Path
) -> None:
    """A signal ends a relay while it waits for a broker that is gone, and it leaves all rows."""
    settings.CELERY_BROKER_URL = NOBODY
    row = leave(alias)
    with relaying(tmp_path) as relay:
        wait_for(lambda: "The broker can't be reached" in relay.log, 30)
        assert relay.end() == 0
    assert relay.log.endswith("Sent 0 message(s).\n")
    assert "password" not in relay.log
    assert ids(alias) == {row.pk}
