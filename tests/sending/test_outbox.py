"""Rows of the outbox on the sending side: when they are there, and when they are gone."""

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis
from celery import Celery, chain, chord, group, shared_task
from celery.app.trace import build_tracer
from celery.canvas import Signature
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import after_task_publish
from django.db import DEFAULT_DB_ALIAS, DatabaseError, DataError, connections, transaction
from django.db.models.signals import post_delete, post_save, pre_delete, pre_save
from django.http import HttpRequest, HttpResponse
from django.test import Client, TestCase
from django.test.utils import CaptureQueriesContext
from django.urls import path
from kombu.exceptions import OperationalError

from django_celery_safe import (
    ConfigurationError,
    NotSerializable,
    SafeTask,
    WrongTransaction,
    batches,
    find_lock,
    send_on_commit,
    single_instance,
)
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, OutboxMessages
from django_celery_safe.sending import outbox
from django_celery_safe.sending import publisher as publisher_module
from django_celery_safe.sending.relay import Relay
from django_celery_safe.signals import task_duplicate, task_send_failed, task_sent
from django_celery_safe.testing import on_commit_now
from tests.app.models import Person
from tests.app.tasks import add, total
from tests.conftest import MakeDatabase
from tests.kinds import KINDS
from tests.processes import dead_port
from tests.sending.conftest import ONE_TRY, MakeApp, hearing
from tests.sending.published import Published, ids_in, take_published
from tests.servers import RedisServer
from tests.versions import IS_KOMBU_57

if TYPE_CHECKING:
    from pytest_django import Settings

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]

TABLE = OutboxMessage._meta.db_table


@shared_task(base=SafeTask, outbox=True)
def kept(*args: object) -> None:
    """Go through the outbox whatever the setting says."""


@shared_task(base=SafeTask, outbox=False)
def not_kept(*args: object) -> None:
    """Never go through the outbox unless a call says so."""


@shared_task(base=SafeTask, send_on_commit=True, outbox=True)
def deferring(*args: object) -> None:
    """Go through the outbox with every send."""


class Rollback(Exception):
    """Ends a transaction."""


@contextmanager
def rolled_back(using: str = DEFAULT_DB_ALIAS) -> Iterator[None]:
    """Roll the block's transaction back."""
    with pytest.raises(Rollback), transaction.atomic(using=using):
        yield
        raise Rollback


@pytest.fixture(params=KINDS)
def alias(request: pytest.FixtureRequest, make_database: MakeDatabase) -> str:
    """The alias of a database of each kind."""
    return make_database(request.param)


@pytest.fixture
def without_broker(make_app: MakeApp) -> Celery:
    """An app whose broker refuses connections."""
    url = f"redis://127.0.0.1:{dead_port()}/0"
    return make_app(broker_url=url, task_publish_retry_policy=ONE_TRY)


def rows(using: str = DEFAULT_DB_ALIAS) -> list[OutboxMessage]:
    """Return the outbox of a database, in order."""
    return list(OutboxMessage.objects.using(using).order_by("pk"))


def ids(messages: list[Published]) -> list[str]:
    """Return the ids of messages."""
    return [message.id for message in messages]


def row_ids(using: str = DEFAULT_DB_ALIAS) -> list[str]:
    """Return the task ids of the rows of a database."""
    return [row.task_id for row in rows(using)]


def keep(number: Any, using: str = DEFAULT_DB_ALIAS, **options: Any) -> Any:
    """Send a task through the outbox of a database."""
    return add.apply_async_on_commit((number,), using=using, outbox=True, **options)


# Transactions.


def test_a_row_is_there_until_the_broker_has_its_message(alias: str, sent: Sent) -> None:
    """It is part of the transaction, unseen by others; the commit publishes and deletes it."""
    seen_by_others: list[int] = []

    def look() -> None:
        seen_by_others.append(OutboxMessage.objects.using(alias).count())
        connections[alias].close()

    with hearing(task_sent) as told, transaction.atomic(using=alias):
        result = keep(1, alias)
        (row,) = rows(alias)
        assert (row.task, row.task_id, row.attempts) == (add.name, result.id, 0)
        assert str(row) == f"{add.name}[{result.id}]"
        other = threading.Thread(target=look)
        other.start()
        other.join()
        assert seen_by_others == [0]
        assert sent() == []
    assert rows(alias) == []
    assert ids(sent()) == [result.id]
    assert result.send_error is None
    assert [said["task_id"] for said in told] == [result.id]


def test_the_row_is_committed_when_its_message_is_published(alias: str, sent: Sent) -> None:
    """A process that dies between the two leaves a row, also without a transaction."""
    states: list[tuple[bool, int]] = []

    def look(**_: Any) -> None:
        states.append((connections[alias].in_atomic_block, len(rows(alias))))

    after_task_publish.connect(look, weak=False)
    try:
        keep(1, alias)
        with transaction.atomic(using=alias):
            keep(2, alias)
    finally:
        after_task_publish.disconnect(look)
    assert states == [(False, 1), (False, 1)]
    assert rows(alias) == []
    assert len(sent()) == 2


def test_a_rollback_leaves_nothing(alias: str, sent: Sent) -> None:
    """A rollback, or that of a savepoint, leaves no row and no message, now or later."""
    with rolled_back(alias):
        keep(1, alias)
        send_on_commit(group(add.s(2), add.s(3)), using=alias, outbox=True)
    assert rows(alias) == []
    with transaction.atomic(using=alias):
        before = keep(4, alias)
        with rolled_back(alias):
            keep(5, alias)
            with transaction.atomic(using=alias):
                keep(6, alias)
        after = keep(7, alias)
        assert row_ids(alias) == [before.id, after.id]
    assert ids(sent()) == [before.id, after.id]
    assert rows(alias) == []


def test_nested_blocks_send_at_the_outermost_commit(alias: str, sent: Sent) -> None:
    """The end of an inner ``atomic()`` publishes nothing and deletes nothing."""
    with transaction.atomic(using=alias):
        with transaction.atomic(using=alias):
            inner = keep(1, alias)
        assert sent() == []
        outer = keep(2, alias)
        assert row_ids(alias) == [inner.id, outer.id]
    assert ids(sent()) == [inner.id, outer.id]
    assert rows(alias) == []


def test_rows_live_in_the_database_of_their_transaction(
    sent: Sent, make_database: MakeDatabase
) -> None:
    """``using`` says where a row is; another database's commit or rollback does not touch it."""
    first, second = make_database("postgres"), make_database("sqlite-immediate")
    with transaction.atomic(using=first):
        with rolled_back(second):
            one = keep(1, first)
            keep(2, second)
            assert (row_ids(first), len(rows(second)), rows()) == ([one.id], 1, [])
        assert (row_ids(first), rows(second)) == ([one.id], [])
        with transaction.atomic(using=second):
            two = send_on_commit(chain(add.s(3), add.s(4)), using=second, outbox=True)
        assert ids(sent()) == [two.parent.id]
    assert ids(sent()) == [one.id]
    assert rows(first) == rows(second) == []


def test_the_wrong_transaction_is_an_error(sent: Sent, make_database: MakeDatabase) -> None:
    """A row in another database than the open transaction would not be part of it."""
    other = make_database("sqlite-immediate")
    with transaction.atomic(using=other):
        for send in (
            lambda: keep(1),
            lambda: kept.delay_on_commit(1),
            lambda: deferring.delay(1),
            lambda: send_on_commit(group(add.s(1), add.s(2)), outbox=True),
        ):
            with pytest.raises(WrongTransaction, match=f"Pass using='{other}'"):
                send()
    with transaction.atomic(), pytest.raises(WrongTransaction, match="using='default'"):
        keep(1, other)
    assert rows() == rows(other) == sent() == []


@contextmanager
def manual_commits(using: str) -> Iterator[None]:
    """Turn autocommit off during the block, and on without a rollback, which would forget."""
    transaction.set_autocommit(False, using=using)
    try:
        yield
    finally:
        transaction.set_autocommit(True, using=using)


def test_without_autocommit_there_is_no_outbox(alias: str, sent: Sent) -> None:
    """Django does not know of a commit that is the project's own."""
    with manual_commits(alias):
        for send in (
            lambda: keep(1, alias),
            lambda: send_on_commit(group(add.s(1), add.s(2)), using=alias, outbox=True),
        ):
            with pytest.raises(WrongTransaction, match="autocommit is off"):
                send()
        transaction.rollback(using=alias)
    assert rows(alias) == sent() == []


@pytest.mark.parametrize("ending", ["commit", "rollback", "commit, then rollback"])
def test_atomic_without_autocommit(ending: str, alias: str, sent: Sent) -> None:
    """The project's commit keeps the row, also where Django forgets what was to run then."""
    with manual_commits(alias):
        # A SAVEPOINT that begins SQLite's transaction also ends it.
        Person.everyone.using(alias).create()
        with transaction.atomic(using=alias):
            result = keep(1, alias)
        if "commit" in ending:
            transaction.commit(using=alias)
        if "rollback" in ending:
            transaction.rollback(using=alias)
        assert sent() == []
    assert ids(sent()) == ([result.id] if ending == "commit" else [])
    assert row_ids(alias) == ([result.id] if ending == "commit, then rollback" else [])


@pytest.mark.parametrize("form", ["task", "attribute", "canvas"])
def test_autocommit_commits_the_row_at_once(form: str, alias: str, sent: Sent) -> None:
    """Outside a transaction the message is kept, published and deleted by the call."""
    result: Any
    if form == "task":
        result = keep(1, alias)
    elif form == "attribute":
        result = kept.apply_async_on_commit((1,), using=alias)
    else:
        result = send_on_commit(chain(add.s(1), add.s(2)), using=alias, outbox=True)
    assert len(ids(sent())) == 1
    assert result.send_error is None
    assert rows(alias) == []
    assert not connections[alias].in_atomic_block


@pytest.mark.parametrize("count", [1, 3])
def test_without_a_broker_the_rows_stay(
    count: int, alias: str, without_broker: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is raised, in a transaction or not; the result, a signal and a warning tell."""
    task = without_broker.tasks[add.name]

    def send() -> Any:
        if count == 1:
            return task.apply_async_on_commit((1,), using=alias, outbox=True)
        return send_on_commit(group(task.s(n) for n in range(count)), using=alias, outbox=True)

    with hearing(task_send_failed) as told:
        results = [send()]
        with transaction.atomic(using=alias):
            results.append(send())
    assert [type(result.send_error) for result in results] == [OperationalError] * 2
    assert [row.attempts for row in rows(alias)] == [0] * (2 * count)
    assert [said["task_id"] for said in told] == row_ids(alias)
    assert {said["kept"] for said in told} == {True}
    assert {said["error"] for said in told} == {result.send_error for result in results}
    levels = {record.levelname for record in caplog.records if "outbox keeps" in record.message}
    assert levels == {"WARNING"}


#: Plain sends, of which an option or the task says that they go through the outbox.
PLAIN: dict[str, Callable[[Any, str], Any]] = {
    "apply_async": lambda task, using: task.apply_async((1,), outbox=True, using=using),
    "signature": lambda task, using: task.s(1).apply_async(outbox=True, using=using),
    "set": lambda task, using: task.s(1).set(outbox=True, using=using).delay(),
    "deferring": lambda task, using: task.app.tasks[deferring.name].apply_async((1,), using=using),
}


@pytest.mark.parametrize("send", PLAIN.values(), ids=PLAIN.keys())
def test_a_plain_send_commits_its_row_before_it_publishes(
    send: Callable[[Any, str], Any], alias: str, broker: Celery, sent: Sent
) -> None:
    """Without a transaction the call makes one for the row, and publishes when it has committed."""
    states: list[tuple[bool, list[str]]] = []

    def look(**_: Any) -> None:
        states.append((connections[alias].in_atomic_block, row_ids(alias)))

    after_task_publish.connect(look, weak=False)
    try:
        result = send(broker.tasks[add.name], alias)
    finally:
        after_task_publish.disconnect(look)
    assert states == [(False, [result.id])]
    assert ids(sent()) == [result.id]
    assert rows(alias) == []


@pytest.mark.parametrize("send", PLAIN.values(), ids=PLAIN.keys())
def test_a_plain_send_raises_nothing_without_a_broker(
    send: Callable[[Any, str], Any], alias: str, without_broker: Celery
) -> None:
    """Without a transaction, too, the call returns, the row is there, and the result tells why."""
    with hearing(task_send_failed) as told:
        result = send(without_broker.tasks[add.name], alias)
    assert not connections[alias].in_atomic_block
    assert [(row.task_id, row.attempts) for row in rows(alias)] == [(result.id, 0)]
    assert isinstance(result.send_error, OperationalError)
    assert [(said["task_id"], said["kept"]) for said in told] == [(result.id, True)]


# Costs.


def test_a_send_is_one_query_and_its_end_two(alias: str, broker: Celery) -> None:
    """One INSERT in the transaction; after it one look whether the row is there, one DELETE."""
    keep(0, alias)
    with transaction.atomic(using=alias):
        with CaptureQueriesContext(connections[alias]) as inside:
            keep(1, alias)
        after = CaptureQueriesContext(connections[alias]).__enter__()
    after.__exit__(None, None, None)
    assert [query["sql"].split()[0] for query in inside.captured_queries] == ["INSERT"]
    touching = [query["sql"] for query in after.captured_queries if TABLE in query["sql"]]
    assert [sql.split()[0] for sql in touching] == ["SELECT", "DELETE"]


@pytest.mark.parametrize(
    ("outbox", "words"), [(True, ["INSERT", "DELETE"]), ("until_done", ["INSERT", "UPDATE"])]
)
def test_a_send_outside_a_transaction_has_two_short_queries(
    outbox: Any, words: list[str], alias: str, broker: Celery
) -> None:
    """It writes its row and records that it was sent; a carried row is due after one interval."""
    with CaptureQueriesContext(connections[alias]) as queries:
        add.apply_async_on_commit((1,), using=alias, outbox=outbox)
    texts = [query["sql"] for query in queries.captured_queries if TABLE in query["sql"]]
    assert [sql.split()[0] for sql in texts] == words
    assert "CASE" not in texts[1]


CANVASES: dict[str, tuple[Callable[[], Signature[Any]], int]] = {
    "chain": (lambda: chain(add.s(1), add.s(2)), 1),
    "group": (lambda: group(add.s(n) for n in range(5)), 5),
    "chord": (lambda: chord([add.s(1), add.s(2)], total.s()), 2),
    "chord of chords": (
        lambda: chord([chord([add.s(1), add.s(2)], total.s()), add.s(3)], total.s()),
        3,
    ),
}


@pytest.mark.parametrize(("make", "count"), CANVASES.values(), ids=CANVASES.keys())
def test_a_canvas_is_one_insert(
    make: Callable[[], Signature[Any]], count: int, alias: str, sent: Sent
) -> None:
    """All its messages are inserted at once, in a savepoint, and published in their order."""
    with transaction.atomic(using=alias):
        with CaptureQueriesContext(connections[alias]) as inside:
            result = send_on_commit(make(), using=alias, outbox=True)
        kept_ids = row_ids(alias)
    words = [query["sql"].split()[0] for query in inside.captured_queries]
    assert words == ["SAVEPOINT", "INSERT", "RELEASE"]
    assert len(kept_ids) == count
    assert set(kept_ids) <= ids_in(result)
    assert ids(sent()) == kept_ids
    assert rows(alias) == []


def test_a_large_group_is_kept_whole(alias: str, sent: Sent, settings: "Settings") -> None:
    """Beyond a hundred rows there are more INSERTs, and still all or nothing."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_SEND_TIMEOUT": 30}
    with transaction.atomic(using=alias):
        result = send_on_commit(group(add.s(n) for n in range(250)), using=alias, outbox=True)
        assert row_ids(alias) == [part.id for part in result]
    assert ids(sent()) == [part.id for part in result]
    assert rows(alias) == []


BROKEN: dict[str, Callable[[], Signature[Any]]] = {
    "arguments": lambda: group(add.s(1), add.s(object())),
    "arity": lambda: group(add.s(1), add.s(1, 2, 3)),
    "header": lambda: group(add.s(1), add.s(2).set(headers={"ours": object()})),
    "chord body": lambda: chord([add.s(1), add.s(2)], total.s(object())),
    "row": lambda: group(add.s(1), add.s(2).set(task_id="a\0b")),
}


@pytest.mark.parametrize("make", BROKEN.values(), ids=BROKEN.keys())
def test_a_canvas_is_kept_whole_or_not_at_all(
    make: Callable[[], Signature[Any]], make_database: MakeDatabase, sent: Sent
) -> None:
    """One member that can't be kept keeps the others out; the transaction goes on."""
    alias = make_database("postgres")
    with transaction.atomic(using=alias):
        with pytest.raises((TypeError, DataError)):
            send_on_commit(make(), using=alias, outbox=True)
        assert rows(alias) == []
        Person.everyone.using(alias).create()
        good = keep(1, alias)
    assert ids(sent()) == [good.id]
    assert Person.everyone.using(alias).count() == 1
    assert rows(alias) == []


def test_large_messages_are_written_a_few_at_a_time(
    alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An INSERT has a number of bytes at most, or a single message; all are published."""
    monkeypatch.setattr(batches, "BATCH_BYTES", 5000)
    monkeypatch.setattr(outbox, "PACKET_BYTES", 5000)  # of MySQL
    signatures = [add.s("x" * 2000), add.s("x" * 9000), add.s(1), add.s(2)]
    with transaction.atomic(using=alias), CaptureQueriesContext(connections[alias]) as inside:
        result = send_on_commit(group(signatures), using=alias, outbox=True)
    words = [query["sql"].split()[0] for query in inside.captured_queries]
    assert words.count("INSERT") == 3
    assert ids(sent()) == [one.id for one in result]
    assert rows(alias) == []


# Chords, of which the result backend has to know first.


@contextmanager
def published_by(who: str, using: str) -> Iterator[None]:
    """Let what is sent inside be published by its commit, or left to a relay, which follows."""
    with transaction.atomic(using=using):
        yield
        if who == "relay":
            connections[using].run_on_commit.clear()
    if who == "relay":
        OutboxMessage.objects.using(using).pending().release()
        relay = Relay(using)
        relay.drain()
        relay.close()
    assert rows(using) == []


def run_here(app: Celery, message: Published) -> Any:
    """Run a message in this process as a worker's child would; return what the task returned."""
    task: Any = app.tasks[message.task]
    args, kwargs, embedded = message.body
    trace = build_tracer(task.name, task, app=app)
    return trace(message.id, args, kwargs, {**message.headers, **embedded}).retval


@pytest.mark.parametrize("who", ["commit", "relay"])
def test_a_result_backend_that_counts_in_a_cache_is_told_of_a_chord(
    who: str, alias: str, make_app: MakeApp, redis_server: RedisServer
) -> None:
    """It hears nothing before the commit, and enough to send the body when the header is done."""
    app = make_app(result_backend="cache+memory://")
    header = [app.tasks[add.name].s(number) for number in (1, 2)]
    with published_by(who, alias):
        body = app.tasks[total.name].s()
        result = send_on_commit(chord(header, body), using=alias, outbox=True)
        assert app.GroupResult.restore(result.parent.id) is None
    known: Any = app.GroupResult.restore(result.parent.id)
    members = [part.id for part in result.parent]
    assert [part.id for part in known] == members
    messages = take_published(redis_server)
    assert ids(messages) == members
    assert [run_here(app, message) for message in messages] == [1, 2]
    (last,) = take_published(redis_server)
    assert last.id == result.id
    assert run_here(app, last) == 3


@pytest.mark.parametrize("who", ["commit", "relay"])
def test_chords_that_begin_with_the_same_task_id_are_both_told(
    who: str, alias: str, broker: Celery, redis_server: RedisServer, sent: Sent
) -> None:
    """Two of one transaction are two for the result backend, whatever ids the project chose."""
    with published_by(who, alias):
        results = [
            send_on_commit(
                chord([add.s(1).set(task_id="same"), *[add.s(2)] * more], total.s()),
                using=alias,
                outbox=True,
            )
            for more in (1, 2)
        ]
        assert row_ids(alias).count("same") == 2
    backend: Any = broker.backend
    with redis_server.client(db=2) as client:
        keys = [backend.get_key_for_group(result.parent.id, ".s") for result in results]
        assert [client.get(key) for key in keys] == [b"2", b"3"]
    assert ids(sent()) == [part.id for result in results for part in result.parent]


# Requests, eager tasks and tests.


def buy(request: HttpRequest, using: str, outcome: str) -> HttpResponse:
    """Write a row and send a task, inside the transaction of ATOMIC_REQUESTS."""
    Person.everyone.using(using).create()
    result = keep(1, using)
    assert row_ids(using) == [result.id]
    if outcome == "fail":
        raise Rollback
    return HttpResponse(result.id)


urlpatterns = [path("buy/<using>/<outcome>/", buy)]


def test_a_request_is_a_transaction(alias: str, sent: Sent, settings: "Settings") -> None:
    """With ATOMIC_REQUESTS the answer comes after the publication; an error sends nothing."""
    settings.ROOT_URLCONF = __name__
    settings.ALLOWED_HOSTS = ["testserver"]
    connections.settings[alias]["ATOMIC_REQUESTS"] = True
    with pytest.raises(Rollback):
        Client().get(f"/buy/{alias}/fail/")
    assert (sent(), rows(alias), Person.everyone.using(alias).count()) == ([], [], 0)
    answer = Client().get(f"/buy/{alias}/succeed/")
    assert ids(sent()) == [answer.content.decode()]
    assert (rows(alias), Person.everyone.using(alias).count()) == ([], 1)


def test_eager_tasks_need_no_row(broker: Celery) -> None:
    """An eager task needs no row, since it can't be lost; it runs at the commit."""
    broker.conf.task_always_eager = True
    with CaptureQueriesContext(connections[DEFAULT_DB_ALIAS]) as queries:
        at_once = [keep(1), send_on_commit(group(add.s(1), add.s(2)), outbox=True)]
        with transaction.atomic():
            later = [keep(2), send_on_commit(chain(add.s(1), add.s(2)), outbox=True)]
            assert later[0].state == "PENDING"
    assert [result.get() for result in (*at_once, *later)] == [1, [1, 2], 2, 3]
    assert [query for query in queries.captured_queries if TABLE in query["sql"]] == []


class TestCaseTests(TestCase):
    """The outbox in a plain Django TestCase."""

    @pytest.fixture(autouse=True)
    def use_private_broker(self, broker: Celery, redis_server: RedisServer) -> None:
        """Take messages from the private Redis."""
        self.sent = lambda: ids(take_published(redis_server))

    def test_captured_callbacks_publish_and_delete(self) -> None:
        """captureOnCommitCallbacks(execute=True) does what the commit would do."""
        with self.captureOnCommitCallbacks(execute=True) as callbacks:
            alone = keep(1)
            with transaction.atomic():
                both = send_on_commit(group(add.s(2), add.s(3)), outbox=True)
            wanted = [alone.id, *(part.id for part in both)]
            assert row_ids() == wanted
            assert self.sent() == []
        assert len(callbacks) == 2
        assert self.sent() == wanted
        assert rows() == []

    def test_without_it_the_rows_can_be_looked_at(self) -> None:
        """Nothing is published, and the rows go with the test."""
        with transaction.atomic():
            result = deferring.delay(1)
        assert row_ids() == [result.id]
        assert self.sent() == []

    def test_on_commit_now(self) -> None:
        """Its rows stay for drain_outbox, or go with a rollback; nothing is published."""
        with on_commit_now():
            alone = keep(1)
            with transaction.atomic():
                inside = keep(2)
            with rolled_back():
                keep(3)
        assert row_ids() == [alone.id, inside.id]
        assert self.sent() == []


# Ways to ask for the outbox.


@pytest.mark.parametrize("setting", [None, False, True])
@pytest.mark.parametrize("task", [add, kept, not_kept], ids=["undecided", "True", "False"])
@pytest.mark.parametrize("argument", [None, False, True])
@pytest.mark.parametrize("form", ["task", "canvas", "signature"])
def test_argument_beats_attribute_beats_setting(
    form: str,
    argument: bool | None,
    task: Any,
    setting: bool | None,
    sent: Sent,
    settings: "Settings",
) -> None:
    """The first of them that says anything decides; without a word there is no row."""
    settings.DJANGO_CELERY_SAFE = {} if setting is None else {"OUTBOX": setting}
    said = [one for one in (argument, task.outbox, setting, False) if one is not None]
    with transaction.atomic():
        if form == "task":
            task.apply_async_on_commit((1,), outbox=argument)
        elif form == "canvas":
            send_on_commit(chain(task.s(1), task.s(2)), outbox=argument)
        else:
            send_on_commit(task.s(1), outbox=argument)
        assert len(rows()) == int(said[0])
        assert sent() == []
    assert len(sent()) == 1
    assert rows() == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: group(not_kept.s(1), add.s(2), kept.s(3)),
        lambda: chain(not_kept.s(1), kept.s(2)),
        lambda: chord([add.s(1), add.s(2)], kept.s()),
        lambda: chord([group(add.s(1), kept.s(2)), add.s(1)], total.s()),
        lambda: chain(add.s(1), group(add.s(2), chain(add.s(3), kept.s()))),
    ],
    ids=["group", "chain", "chord body", "inner group", "chain in a group in a chain"],
)
def test_one_task_that_wants_it_decides_for_its_canvas(
    make: Callable[[], Signature[Any]], sent: Sent
) -> None:
    """All of the canvas goes through the outbox, so that no part of it is lost alone."""
    with transaction.atomic():
        send_on_commit(make())
        count = len(rows())
        assert count > 0
        assert sent() == []
    assert len(sent()) == count
    assert rows() == []


def test_plain_sends_of_a_deferring_task_are_kept(alias: str, sent: Sent) -> None:
    """With ``send_on_commit=True`` the attribute ``outbox`` counts for ``.delay()``, too."""
    with transaction.atomic():
        results = [deferring.delay(1), deferring.apply_async((2,), countdown=5)]
        members = group(deferring.s(3), deferring.s(4)).delay()
        expected = [result.id for result in (*results, *members)]
        assert row_ids() == expected
    assert ids(sent()) == expected
    assert rows() == []


@pytest.mark.parametrize(
    "send",
    [
        lambda: add.apply_async((1,), outbox=True),
        lambda: add.s(1).set(outbox=True).delay(),
        lambda: add.s(1).apply_async(outbox=True),
        lambda: send_on_commit(add.s(1).set(outbox=True)),
        lambda: send_on_commit(chain(add.s(1), add.s(2).set(outbox=True))),
        lambda: send_on_commit(not_kept.s(1).set(outbox=True)),
    ],
    ids=["apply_async", "set", "signature", "send_on_commit", "in a chain", "over the attribute"],
)
def test_an_option_asks_for_it_too(send: Callable[[], Any], sent: Sent) -> None:
    """``outbox=True`` as an option of a plain send or a signature means a send on commit."""
    with transaction.atomic():
        send()
        assert len(rows()) == 1
        assert sent() == []
    (message,) = sent()
    assert "outbox" not in {**message.headers, **message.properties}
    assert rows() == []


def test_a_plain_send_of_another_task_is_not_kept(sent: Sent) -> None:
    """Without ``send_on_commit`` a plain ``.delay()`` leaves at once, as Celery's does."""
    with transaction.atomic():
        result = kept.delay(1)
        assert rows() == []
        assert ids(sent()) == [result.id]


def test_what_is_not_known_here_can_be_kept(broker: Celery, sent: Sent) -> None:
    """A task by its name alone needs no code on this side."""
    with transaction.atomic():
        result = send_on_commit(broker.signature("elsewhere.task", (1,)), outbox=True)
        assert row_ids() == [result.id]
    (message,) = sent()
    assert (message.id, message.task) == (result.id, "elsewhere.task")


def test_a_database_without_the_table_is_an_error(alias: str, sent: Sent) -> None:
    """The error says which database, and what to run."""
    with connections[alias].schema_editor() as editor:
        editor.delete_model(OutboxMessage)
    for context in (transaction.atomic(using=alias), rolled_back(alias)):
        with pytest.raises(ConfigurationError, match=f"migrate.*--database={alias}"), context:
            keep(1, alias)
    with pytest.raises(ConfigurationError, match=f"The database '{alias}' has no outbox"):
        keep(1, alias)
    assert sent() == []


# Messages that can be kept, and others.


def test_what_can_not_be_sent_raises_at_the_call(alias: str, sent: Sent) -> None:
    """Nothing is written, and the transaction goes on."""
    person = Person.everyone.using(alias).create()
    with transaction.atomic(using=alias):
        for given, options in [
            (object(), {}),
            ({"deep": [lambda: 1]}, {}),
            (person, {}),
            (Person.everyone.using(alias).all(), {}),
            (iter([1]), {}),
            (1, {"headers": {"ours": object()}}),
            (1, {"headers": {"ours": [{1, 2}.__iter__()]}}),
            (1, {"link": add.s(person)}),
        ]:
            with pytest.raises(NotSerializable):
                keep(given, alias, **options)
        with pytest.raises(TypeError, match="positional argument"):
            add.apply_async_on_commit((1, 2, 3), using=alias, outbox=True)
        assert rows(alias) == []
        good = keep(1, alias)
    with pytest.raises(NotSerializable):
        keep(object(), alias)
    assert ids(sent()) == [good.id]
    assert rows(alias) == []


def test_an_option_that_no_row_can_keep_is_named(sent: Sent) -> None:
    """The error says that the outbox is the reason: without it the option may travel."""
    with transaction.atomic(), pytest.raises(NotSerializable, match="outbox row keeps plain data"):
        keep(1, errback=object())
    assert rows() == sent() == []


@pytest.mark.parametrize("length", [256, 100_000])
def test_a_task_id_that_no_column_holds_is_refused(
    length: int, postgres_alias: str, sent: Sent
) -> None:
    """The call raises before the database is asked, so that the transaction can go on."""
    with transaction.atomic(using=postgres_alias):
        with pytest.raises(NotSerializable, match=f"its task_id.*{length} characters"):
            keep(1, postgres_alias, task_id="x" * length)
        with pytest.raises(NotSerializable):
            send_on_commit(
                group(add.s(1), add.s(2).set(task_id="x" * length)),
                using=postgres_alias,
                outbox=True,
            )
        assert rows(postgres_alias) == []
        longest = keep(1, postgres_alias, task_id="x" * 255)
        assert row_ids(postgres_alias) == [longest.id]
    assert ids(sent()) == [longest.id]


@pytest.mark.parametrize("who", ["commit", "relay"])
def test_a_task_id_may_be_a_uuid(who: str, alias: str, broker: Celery, sent: Sent) -> None:
    """Row, message and result have it as text, as those of a direct send do."""
    given = uuid.uuid4()
    direct = add.apply_async((1,), task_id=given)
    (wanted,) = sent()
    with published_by(who, alias):
        result = add.apply_async((1,), task_id=given, using=alias, outbox=True)
        assert row_ids(alias) == [str(given)]
    (message,) = sent()
    assert message.comparable() == wanted.comparable()
    assert result.id == direct.id == message.headers["id"] == str(given)
    assert result.send_error is None


@pytest.mark.parametrize("timezone", ["UTC", "Asia/Tokyo"])
def test_a_naive_expires_is_that_of_a_direct_send(
    timezone: str, alias: str, make_app: MakeApp, redis_server: RedisServer
) -> None:
    """A moment without an offset is the same one at the commit, in a relay and for Celery."""
    task = make_app(timezone=timezone).tasks[add.name]
    moment = datetime.now(UTC).replace(tzinfo=None, microsecond=0) + timedelta(hours=48)
    task.apply_async((1,), expires=moment)
    with transaction.atomic(using=alias):
        keep_with(task, alias, expires=moment)
    with transaction.atomic(using=alias):
        keep_with(task, alias, expires=moment)
        connections[alias].run_on_commit.clear()
    OutboxMessage.objects.using(alias).update(due_at=Now())
    relay = Relay(alias)
    relay.drain()
    relay.close()
    direct, *others = take_published(redis_server)
    assert len(others) == 2
    for message in others:
        assert message.headers["expires"] == direct.headers["expires"]
        left, wanted = (int(one.properties["expiration"]) for one in (message, direct))
        assert abs(left - wanted) < 60_000
    assert rows(alias) == []


def keep_with(task: Any, using: str, **options: Any) -> Any:
    """Send another app's task through the outbox of a database."""
    return task.apply_async_on_commit((1,), using=using, outbox=True, **options)


def test_arguments_of_5_mb_are_kept(alias: str, sent: Sent) -> None:
    """They arrive whole, and neither the row's text nor a log has them."""
    text = "5 MB " * 1_000_000
    with transaction.atomic(using=alias):
        kept.apply_async_on_commit((text, "ü\0\n"), using=alias)
        (row,) = rows(alias)
        assert len(bytes(row.body)) > len(text)
        assert len(row.properties) < 10_000
        assert len(str(row)) < 200
    (message,) = sent()
    assert message.body[0] == [text, "ü\0\n"]
    assert rows(alias) == []


@pytest.mark.parametrize("serializer", ["json", "pickle", "yaml", "msgpack"])
def test_every_serializer_can_be_kept(serializer: str, alias: str, sent: Sent) -> None:
    """The row keeps the bytes that the serializer made, compressed or not."""
    with transaction.atomic(using=alias):
        for compression in (None, "gzip"):
            kept.apply_async_on_commit(
                ([1, "ü"], {"deep": None}),
                using=alias,
                serializer=serializer,
                compression=compression,
            )
        assert len(rows(alias)) == 2
    assert [list(message.body[0]) for message in sent()] == [[[1, "ü"], {"deep": None}]] * 2
    assert rows(alias) == []


def test_arguments_and_headers_are_those_of_the_call(sent: Sent) -> None:
    """Later changes of the arguments change neither the row nor the message."""
    numbers, headers = [1], {"trace": {"span": [1]}}
    with transaction.atomic():
        kept.apply_async_on_commit((numbers,), headers=headers)
        numbers.append(2)
        headers["trace"]["span"].append(2)
    (message,) = sent()
    assert message.body[0] == [[1]]
    assert message.headers["trace"] == {"span": [1]}


@pytest.mark.parametrize("option", ["connection", "producer"])
def test_another_broker_is_an_error(option: str, broker: Celery, make_app: MakeApp) -> None:
    """No row can keep a connection, and a relay would send to the app's own broker."""
    elsewhere = make_app(broker_url=f"redis://127.0.0.1:{dead_port()}/0")
    with elsewhere.connection_for_write() as connection:
        given: Any = connection
        if option == "producer":
            given = elsewhere.amqp.Producer(connection, auto_declare=False)
        with transaction.atomic():
            for send in (
                lambda: keep(1, **{option: given}),
                lambda: send_on_commit(add.s(1), outbox=True, **{option: given}),
                lambda: deferring.apply_async((1,), **{option: given}),
            ):
                with pytest.raises(TypeError, match="to another broker"):
                    send()
        with pytest.raises(TypeError, match="outbox=False"):
            keep(1, **{option: given})
    assert rows() == []


@pytest.mark.parametrize(
    ("option", "take"),
    [("producer", Celery.producer_or_acquire), ("connection", Celery.connection_for_write)],
)
def test_what_belongs_to_the_apps_own_broker_is_fine(
    option: str, take: Callable[[Celery], Any], broker: Celery, sent: Sent
) -> None:
    """
    A producer is left aside, since it may be someone else's by the time of the commit.

    So is a connection: the message goes where a relay would send it.
    """
    with take(broker) as given, transaction.atomic():
        result = keep(1, **{option: given})
        assert row_ids() == [result.id]
    assert ids(sent()) == [result.id]
    assert rows() == []


@pytest.mark.parametrize("retention", [3600, None])
def test_retention_keeps_rows_as_sent(
    alias: str, sent: Sent, settings: "Settings", retention: int | None
) -> None:
    """With OUTBOX_RETENTION a row says when it was sent, and nobody sends it again."""
    settings.DJANGO_CELERY_SAFE = {"OUTBOX_RETENTION": retention}
    with transaction.atomic(using=alias):
        both = send_on_commit(group(add.s(1), add.s(2)), using=alias, outbox=True)
        results = [keep(1, alias), *both]
    outbox = OutboxMessage.objects.using(alias)
    assert set(row_ids(alias)) == {result.id for result in results}
    assert ids(sent()) == row_ids(alias)
    assert [row.due_at for row in rows(alias)] == [None] * 3
    assert (outbox.sent().count(), outbox.pending().count(), outbox.dead().count()) == (3, 0, 0)
    assert all(row.sent_at >= row.created_at for row in rows(alias) if row.sent_at)


def test_a_row_that_can_not_be_deleted_stays(
    alias: str, sent: Sent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The database gone after the publication: a warning, no error, and a relay sends it again."""

    def refuse(*_: object, **__: object) -> None:
        raise DatabaseError("server closed the connection")

    monkeypatch.setattr(OutboxMessages, "record_sent", refuse)
    with transaction.atomic(using=alias):
        result = keep(1, alias)
    assert ids(sent()) == row_ids(alias) == [result.id]
    assert result.send_error is None
    (warning,) = [record for record in caplog.records if record.name.endswith("departure")]
    assert warning.levelname == "WARNING"
    assert "a relay sends them" in warning.getMessage()


@contextmanager
def failing_receivers() -> Iterator[list[Any]]:
    """Have receivers of others raise when a row is deleted or saved; yield what they got."""
    heard: list[Any] = []

    def fail(**said: Any) -> None:
        heard.append(said["instance"])
        raise ValueError("the fault of another app")

    model_signals = (pre_delete, post_delete, pre_save, post_save)
    for signal in model_signals:
        signal.connect(fail, sender=OutboxMessage)
    try:
        yield heard
    finally:
        for signal in model_signals:
            signal.disconnect(fail, sender=OutboxMessage)


def test_others_receivers_do_not_matter(alias: str, sent: Sent) -> None:
    """A receiver of model signals that raises harms no sender, relay or clean-up."""
    with failing_receivers() as heard:
        with transaction.atomic(using=alias):
            results = [keep(1, alias)]
        with transaction.atomic(using=alias):
            results.append(keep(2, alias))
            connections[alias].run_on_commit.clear()
        outbox = OutboxMessage.objects.using(alias)
        outbox.update(due_at=Now())
        relay = Relay(alias)
        relay.drain()
        relay.close()
        assert ids(sent()) == [result.id for result in results]
        assert (results[0].send_error, rows(alias)) == (None, [])
        with transaction.atomic(using=alias):
            keep(3, alias)
            connections[alias].run_on_commit.clear()
        assert outbox.discard() == 1
    assert heard == []


def group_interrupted_at_its_second(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a group of three; when its second is published, a soft time limit hits."""
    original, interrupted = publisher_module.put, "the second"

    def put(message: Any, *args: Any, **options: Any) -> None:
        if message.task_id == interrupted:
            raise SoftTimeLimitExceeded
        original(message, *args, **options)

    monkeypatch.setattr(publisher_module, "put", put)
    return group(add.s(1), add.s(2).set(task_id=interrupted), add.s(3))


@pytest.mark.parametrize(
    ("in_one_request", "published"),
    [(1, 1), *((number, 0 if IS_KOMBU_57 else 1) for number in (2, 100))],
)
def test_a_soft_time_limit_at_the_commit_is_raised_after_the_rows_are_settled(
    in_one_request: int,
    published: int,
    alias: str,
    sent: Sent,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Published rows are deleted, the others are due, and the committing task gets the limit."""
    monkeypatch.setattr(publisher_module, "TOGETHER", in_one_request)
    members = group_interrupted_at_its_second(monkeypatch)
    with pytest.raises(SoftTimeLimitExceeded), transaction.atomic(using=alias):
        Person.everyone.using(alias).create()
        result = send_on_commit(members, using=alias, outbox=True)
    assert not connections[alias].in_atomic_block
    assert Person.everyone.using(alias).count() == 1
    wanted = [part.id for part in result]
    assert ids(sent()) == wanted[:published]
    assert row_ids(alias) == wanted[published:]
    due = OutboxMessage.objects.using(alias).due()
    assert [(row.task_id, row.attempts) for row in due.order_by("pk")] == [
        (task_id, 0) for task_id in wanted[published:]
    ]
    assert isinstance(result.send_error, SoftTimeLimitExceeded)


@pytest.mark.parametrize("error", [SoftTimeLimitExceeded, redis.TimeoutError])
def test_a_request_of_many_that_is_cut_off_leaves_all_to_a_relay(
    error: type[Exception],
    alias: str,
    sent: Sent,
    make_app: MakeApp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """kombu wraps what ends it: a time limit is the task's still, a silence is waited for once."""
    task, tries = make_app().tasks[add.name], []

    def cut_off(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise error("in the pipeline")

    with monkeypatch.context() as patch:
        patch.setattr(redis.client.Pipeline, "execute", cut_off)
        leaves = pytest.raises(error) if error is SoftTimeLimitExceeded else nullcontext()
        with leaves, transaction.atomic(using=alias):
            members = group(task.s(1), task.s(2), task.s(3))
            result = send_on_commit(members, using=alias, outbox=True)
    assert (len(tries), sent()) == (1, [])
    due = OutboxMessage.objects.using(alias).due().order_by("pk")
    assert list(due.values_list("task_id", flat=True)) == [part.id for part in result]


def test_a_soft_time_limit_in_a_receiver_loses_no_message(sent: Sent) -> None:
    """It hits while ``task_sent`` is received: the others go out, and then it is raised."""

    def interrupt(**_: Any) -> None:
        task_sent.disconnect(interrupt)
        raise SoftTimeLimitExceeded

    task_sent.connect(interrupt)
    with pytest.raises(SoftTimeLimitExceeded), transaction.atomic():
        result = send_on_commit(group(add.s(1), add.s(2), add.s(3)))
    assert ids(sent()) == [part.id for part in result]
    assert result.send_error is None


def test_a_soft_time_limit_at_the_commit_loses_no_other_message(
    sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the outbox nobody else sends the others, so they go out before it is raised."""
    members = group_interrupted_at_its_second(monkeypatch)
    with pytest.raises(SoftTimeLimitExceeded), transaction.atomic():
        result = send_on_commit(members)
    first, _, third = [part.id for part in result]
    assert ids(sent()) == [first, third]


# Tasks that are sent once.


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="end")
def once(number: int) -> None:
    """Be sent once for each number."""


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="end", on_duplicate="raise")
def loud(number: int) -> None:
    """Be sent once for each number, and raise at the second send."""


def keep_once(number: int, using: str) -> Any:
    """Send the task for this number through the outbox."""
    return once.apply_async_on_commit((number,), using=using, outbox=True)


def lock_of(number: int) -> Any:
    """Return the lock that the message for this number holds."""
    return find_lock(f"sent:{once.name}:{number}")


@pytest.mark.usefixtures("locks_in_memory")
def test_the_send_lock_is_taken_at_the_publication(alias: str, sent: Sent) -> None:
    """Not in the transaction, nor by its rollback; the commit takes it and settles the result."""
    with rolled_back(alias):
        keep_once(1, alias)
        assert lock_of(1) is None
    assert lock_of(1) is None
    with transaction.atomic(using=alias):
        result = keep_once(1, alias)
        assert result.is_duplicate is None
        assert lock_of(1) is None
    assert result.is_duplicate is False
    assert lock_of(1).holder.task_id == result.id
    assert ids(sent()) == [result.id]
    assert rows(alias) == []


@pytest.mark.usefixtures("locks_in_memory")
def test_a_duplicate_is_dropped_with_its_row(alias: str, sent: Sent) -> None:
    """In the same transaction or later; its result is that of the message sent before."""
    with hearing(task_duplicate) as told, transaction.atomic(using=alias):
        first, second = keep_once(1, alias), keep_once(1, alias)
        assert len(rows(alias)) == 2
    third = keep_once(1, alias)
    assert [one.is_duplicate for one in (first, second, third)] == [False, True, True]
    assert first.id == second.id == third.id
    assert [one.send_error for one in (first, second, third)] == [None] * 3
    assert ids(sent()) == [first.id]
    assert rows(alias) == []
    assert [said["sent_id"] for said in told] == [first.id]


@pytest.mark.usefixtures("locks_in_memory")
def test_a_duplicate_in_a_canvas_is_published_and_marked(alias: str, sent: Sent) -> None:
    """Others of the canvas wait for it, so it goes out, and its row goes, too."""
    first = keep_once(1, alias)
    with transaction.atomic(using=alias):
        results = send_on_commit(group(once.s(1), once.s(2)), using=alias, outbox=True)
    assert ids(sent()) == [first.id, *(result.id for result in results)]
    assert rows(alias) == []


@pytest.mark.usefixtures("locks_in_memory")
def test_a_send_lock_is_not_held_for_a_broker_that_is_gone(
    alias: str, without_broker: Celery
) -> None:
    """The row stays without the lock; the relay that publishes the message takes it."""
    task = without_broker.tasks[once.name]
    with transaction.atomic(using=alias):
        result = task.apply_async_on_commit((1,), using=alias, outbox=True)
    assert isinstance(result.send_error, OperationalError)
    assert result.is_duplicate is None
    assert row_ids(alias) == [result.id]
    assert lock_of(1) is None


@pytest.mark.usefixtures("locks_in_memory")
def test_raising_on_a_duplicate_and_the_outbox_contradict(alias: str, sent: Sent) -> None:
    """At the commit nobody is left to raise to; the error says so, and no row stays."""
    with transaction.atomic(using=alias), pytest.raises(TypeError, match="too late to raise"):
        loud.apply_async_on_commit((1,), using=alias, outbox=True)
    with pytest.raises(TypeError, match="on_duplicate"):
        loud.apply_async_on_commit((1,), using=alias, outbox=True)
    assert rows(alias) == sent() == []
