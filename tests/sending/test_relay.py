"""The relay, alone and beside others: the messages it sends, and the rows it leaves."""

import io
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from celery import Celery
from celery.signals import after_task_publish
from django.core.management import call_command
from django.db import connections
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, OutboxRelay
from django_celery_safe.sending import housekeeping
from django_celery_safe.sending import publisher as publisher_module
from django_celery_safe.sending import relay as relay_module
from django_celery_safe.sending.outbox import outbox_aliases
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import task_duplicate, task_sent
from tests.app.tasks import add
from tests.background import elsewhere
from tests.conftest import MakeDatabase
from tests.listening import receiving
from tests.processes import FunctionFailed, meet, run_in_processes, start_in_process, tell, wait_for
from tests.sending.conftest import TABLE, dying_sender, hearing, ids, make_due, table
from tests.sending.published import Sent
from tests.sending.test_outbox import keep
from tests.sending.test_unique import once
from tests.servers.databases import DatabaseKind


def leave(alias: str, count: int = 1, task: Any = add, **options: Any) -> list[str]:
    """Leave messages in the outbox that are due; return their task ids."""
    with dying_sender(alias, due=True):
        return [keep(number, alias, task, **options).id for number in range(count)]


def drain(alias: str, **arguments: Any) -> int:
    """Let a new relay send what is due; return how many that was."""
    relay = Relay(alias, **arguments)
    relay.drain()
    return relay.count


@contextmanager
def relaying(alias: str) -> Iterator[threading.Event]:
    """Run a relay in a thread during the block, or until the event is set."""
    stop = threading.Event()

    # The first connection to a SQLite file switches it to WAL. Two that do at once fail, without
    # waiting for each other.
    if connections[alias].vendor == "sqlite":
        connections[alias].ensure_connection()
    running = elsewhere(alias, lambda: Relay(alias).run(stop))
    try:
        yield stop
    finally:
        stop.set()
        running.result(60)


# Messages that it sends.


def test_it_sends_what_is_due_and_deletes_it(alias: str, sent: Sent) -> None:
    """The longest waiting first; a signal tells of each, and the count is theirs."""
    wanted = leave(alias, 3)
    last = table(alias).get(task_id=wanted[0])
    table(alias).filter(pk=last.pk).update(due_at=Now())
    with hearing(task_sent) as told:
        assert drain(alias) == 3
    assert ids(sent()) == [*wanted[1:], wanted[0]] == [said["task_id"] for said in told]
    assert not table(alias).exists()
    assert drain(alias) == 0


@pytest.mark.sql
def test_queries_are_counted_by_batches(
    db_kind: DatabaseKind, alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of a hundred costs what a batch of one does."""
    monkeypatch.setattr(relay_module, "LOOK_BACK", 1000.0)
    leave(alias, 250)
    with CaptureQueriesContext(connections[alias]) as queries:
        relay = Relay(alias)
        sizes = iter(relay.relay_batch, 0)
        assert list(sizes) == [100, 100, 50]
    words = Counter(q["sql"].split()[0] for q in queries.captured_queries if TABLE in q["sql"])
    # At the end it looks where the last batch ended, and then from the beginning. On MariaDB the
    # UPDATE returns nothing, so its rows are read after it. On SQLite it looks before it locks all
    # others out; the lock is a DELETE of nothing.
    selects = 3 + 2 if db_kind == "postgres" else 3 + 3 + 2
    deletes = 3 if db_kind in ("postgres", "mariadb") else 3 + 3
    assert words == {"SELECT": selects, "UPDATE": 3, "DELETE": deletes}
    assert len(sent()) == 250


@pytest.mark.sql
def test_rows_that_a_set_back_clock_left_are_sent(alias: str, sent: Sent) -> None:
    """A row that is due impossibly late is made due at once."""
    wanted = leave(alias)
    table(alias).update(due_at=Now() + timedelta(hours=1))
    assert drain(alias) == 1
    assert ids(sent()) == wanted


@pytest.mark.sql
def test_what_commits_late_with_an_earlier_moment_is_sent(alias: str, sent: Sent) -> None:
    """A relay looks from the beginning before it is idle, and once a second while it is busy."""
    late = leave(alias, 2)
    table(alias).update(due_at=None)  # as if not committed yet

    def commit(task_id: str) -> None:
        table(alias).filter(task_id=task_id).update(due_at=Now() - timedelta(hours=1))

    relay = Relay(alias)
    leave(alias)
    assert relay.relay_batch() == 1
    commit(late[0])
    assert relay.relay_batch() == 1
    assert ids(sent())[1:] == late[:1]

    def found() -> bool:
        leave(alias)
        commit(late[1])
        assert relay.relay_batch() >= 1
        return late[1] in ids(sent())

    wait_for(found)


@contextmanager
def pooled(alias: str) -> Iterator[None]:
    """Let all threads share a single connection to a database, as a pool of psycopg does."""
    connections[alias].close()
    pool = {"min_size": 1, "max_size": 1, "timeout": 5}
    connections.settings[alias]["OPTIONS"]["pool"] = pool
    connections[alias].settings_dict["OPTIONS"]["pool"] = pool
    try:
        yield
    finally:
        connections[alias].close_pool()  # type: ignore[attr-defined]
        del connections[alias].settings_dict["OPTIONS"]["pool"]


def test_a_pool_of_one_connection_is_enough_for_the_command(
    postgres_alias: str, sent: Sent
) -> None:
    """The command gives its own connection back before a thread relays, and sweeps, with it."""
    wanted = leave(postgres_alias)

    def end(**_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with pooled(postgres_alias), receiving(task_sent, end):
        assert table(postgres_alias).exists()  # as the command looks, which relays all
        call_command("celery_outbox", "relay", "--database", postgres_alias, stdout=io.StringIO())
    assert ids(sent()) == wanted


# Several relays, and their ends.


def relay_all(alias: str) -> int:
    """Send what is due, beside others."""
    meet()
    return drain(alias)


@pytest.mark.sql
def test_relays_side_by_side_send_each_message_once(alias: str, sent: Sent) -> None:
    """Three processes share the rows; none is sent twice, none is left."""
    wanted = leave(alias, 450)
    counts = run_in_processes(relay_all, 3, alias)
    assert sum(counts) == 450
    assert sorted(ids(sent())) == sorted(wanted)
    assert not table(alias).exists()


def relay_and_stand_still(alias: str, point: str) -> int:
    """Stop at a point for as long as the test wants, then go on."""
    original = getattr(Relay, point)

    def standing(self: Relay, *args: Any) -> Any:
        if self._next:
            setattr(Relay, point, original)
            tell(point)
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, *args)

    setattr(Relay, point, standing)
    return drain(alias)


@pytest.mark.parametrize("point", ["_publish", "_settle"])
def test_a_relay_that_stands_still_loses_nothing(point: str, alias: str, sent: Sent) -> None:
    """Beyond its lease another sends its batch; going on, it may send it again, no more."""
    wanted = leave(alias, 5)
    with start_in_process(relay_and_stand_still, alias, point) as other:
        assert other.receive() == point
        make_due(alias)  # its lease is over
        assert drain(alias) == 5
        assert not table(alias).exists()
        first = ids(sent())
        assert set(first) == set(wanted)
        late = leave(alias, 1)
        other.resume()
        other.result()
    drain(alias)
    counted = Counter([*first, *ids(sent())])
    assert set(counted) == {*wanted, *late}
    assert max(counted.values()) <= 2
    assert not table(alias).exists()


def relay_and_die(alias: str, point: str) -> None:
    """Be killed when the module's or the class's function of this name is called."""
    owner: Any = Relay if hasattr(Relay, point) else publisher_module
    setattr(owner, point, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    drain(alias)


@pytest.mark.sql
@pytest.mark.parametrize(("point", "times"), [("put", 1), ("_record_sent", 2)])
def test_a_killed_relay_is_no_duplicate_of_itself(
    point: str, times: int, alias: str, sent: Sent, in_redis: None
) -> None:
    """Killed between the claim of a message's lock and its deletion: it is sent again."""
    (wanted,) = leave(alias, task=once)
    with (
        start_in_process(relay_and_die, alias, point) as relay,
        pytest.raises(FunctionFailed, match="ended with status -9"),
    ):
        relay.result()
    assert table(alias).count() == 1
    make_due(alias)
    with hearing(task_duplicate) as duplicates:
        assert drain(alias) == 1
    assert ids(sent()) == [wanted] * times
    assert duplicates == []
    assert not table(alias).exists()


# Running.


def test_it_ends_soon_and_finishes_its_batch(alias: str, sent: Sent) -> None:
    """Told to stop in the middle of a batch, it sends and deletes the rest, and no other batch."""
    wanted = leave(alias, 150)
    with relaying(alias) as stop, receiving(after_task_publish, lambda **_: stop.set()):
        assert stop.wait(30)
    assert ids(sent()) == wanted[:100]
    assert sorted(table(alias).values_list("task_id", flat=True)) == sorted(wanted[100:])


def test_an_idle_relay_hears_of_its_end(
    alias: str, broker: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not sleep through it."""
    monkeypatch.setattr(relay_module, "IDLE", 600.0)
    with relaying(alias):
        wait_for(lambda: OutboxRelay.objects.using(alias).exists())


def test_it_notes_that_it_is_there(
    alias: str, broker: Celery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row for all relays of a database says who was here last, and when."""
    relay, other = Relay(alias), Relay(alias)
    relay.housekeeping.take_turn_if_due()
    before = OutboxRelay.objects.using(alias).get()
    assert before.pid == os.getpid()
    monkeypatch.setattr(housekeeping, "HOST", "elsewhere")
    other.housekeeping.take_turn_if_due()
    row = OutboxRelay.objects.using(alias).get()
    assert (str(row), row.pk) == (f"elsewhere pid {os.getpid()}", 1)
    assert row.seen_at > before.seen_at


# Apps.


def test_a_row_for_another_relay_waits_for_it(
    alias: str, broker: Celery, sent: Sent, caplog: pytest.LogCaptureFixture
) -> None:
    """No other app's broker gets it, and no attempt is used; the row and a warning say why."""
    broker.set_current()
    (wanted,) = leave(alias)
    properties = {**json.loads(table(alias).get().properties), "app": "elsewhere"}
    table(alias).update(properties=json.dumps(properties))
    reason = "it was sent by the Celery app 'elsewhere', and here is only "
    others = leave(alias, 2)
    assert drain(alias) == 2
    assert ids(sent()) == others
    left = table(alias).annotate(now=Now()).get()
    assert (left.task_id, left.attempts, left.state) == (wanted, 0, "pending")
    assert timedelta(seconds=5) < left.due_at - left.now <= timedelta(seconds=relay_module.PUT_OFF)
    assert left.error.startswith(reason)
    assert left.error in caplog.text


# The shipped task.


def autodiscover() -> tuple[bool, bool]:
    """Tell whether the task is there before and after a project's app looks for tasks."""
    app = Celery("project")
    before = "django_celery_safe.tasks" in sys.modules
    app.autodiscover_tasks()
    app.loader.import_default_modules()
    return before, "django_celery_safe.tasks.relay_outbox" in app.tasks


def test_a_project_that_autodiscovers_has_the_task() -> None:
    """The app being in INSTALLED_APPS is enough."""
    with start_in_process(autodiscover) as process:
        assert process.result() == (False, True)


def test_the_task_relays_all_outboxes(
    make_database: MakeDatabase, alias: str, sent: Sent, settings: Settings
) -> None:
    """It sends what is due in every database that has the table, and returns how many."""
    from django_celery_safe.tasks import relay_outbox

    settings.DATABASE_ROUTERS = ["tests.routing.NotInDefault"]
    first, second = alias, make_database("sqlite-immediate")
    without = make_database("sqlite-immediate")
    with connections[without].schema_editor() as editor:
        editor.delete_model(OutboxMessage)
    assert {first, second} <= set(outbox_aliases())
    assert without not in outbox_aliases()
    wanted = [*leave(first, 2), *leave(second, 3)]
    assert relay_outbox() == 5
    assert ids(sent()) == wanted
