"""Tasks with ``unique_until``, sent without a worker: duplicates, and locks that stay."""

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from celery import Celery, chain, group, shared_task
from celery.canvas import Signature
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction
from kombu.exceptions import OperationalError

from django_celery_safe import (
    AlreadySent,
    HeldLock,
    LockBackendError,
    NotSerializable,
    SafeTask,
    WrongTransaction,
    find_lock,
    iter_locks,
    release_lock,
    send_on_commit,
    single_instance,
)
from django_celery_safe.delivery.copies import resending
from django_celery_safe.delivery.header import FORMAT, HEADER
from django_celery_safe.signals import task_duplicate, task_send_failed, task_sent
from tests.app.celery import app
from tests.app.tasks import add
from tests.concurrency.holders import remaining
from tests.concurrency.mailbox import Mailbox
from tests.conftest import REDIS_BACKENDS, MakeRedisCache, require
from tests.contract.conftest import SHARED_STORES, use_store
from tests.processes import dead_port, meet, run_in_processes, start_in_process
from tests.sending.conftest import ONE_TRY, MakeApp, hearing
from tests.sending.published import Published, ids_in, take_published
from tests.servers import RedisServer, ServerPool

if TYPE_CHECKING:
    from pytest_django import Settings

__all__ = ["use_store"]

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]

#: Seconds that a test may take between a send and a look at its lock.
SLACK = 15


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="end")
def once(number: int, note: str = "") -> int:
    """Be sent once for each number."""
    return number


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="start", on_duplicate="raise")
def loud(number: int) -> None:
    """Be sent once, and raise at the second send."""


@shared_task(base=SafeTask, send_on_commit=True)
@single_instance(key="{number}", unique_until="end")
def deferring(number: int) -> None:
    """Be sent once, at the commit, by every send."""


@shared_task(base=SafeTask, ignore_result=True)
@single_instance(unique_until="end", sent_timeout=timedelta(seconds=100), cache="locks")
def elsewhere(number: int) -> None:
    """Be sent once, under a lock in a cache of its own, with a lease of its own."""


@shared_task(base=SafeTask)
@single_instance(key="{number}")
def alone(number: int) -> None:
    """Run alone, and be sent as often as one likes."""


@shared_task
@single_instance(key="{number}", unique_until="end")
def plain(number: int) -> None:
    """Have Celery's own base, which knows of no lock at the send."""


@pytest.fixture(autouse=True)
def locks(redis_cache_settings: MakeRedisCache, settings: "Settings") -> None:
    """Locks are in the private Redis, emptied; so are those of the cache ``locks``."""
    settings.CACHES = {
        **redis_cache_settings("django-redis"),
        **redis_cache_settings("django", "locks", KEY_PREFIX="other"),
    }


class Rollback(Exception):
    """Ends a transaction."""


@contextmanager
def rolled_back() -> Iterator[None]:
    """Roll the block's transaction back."""
    with pytest.raises(Rollback), transaction.atomic():
        yield
        raise Rollback


def lock_of(number: int, task: Any = once) -> HeldLock | None:
    """Return the lock that the message for this number holds."""
    return find_lock(f"sent:{task.name}:{number}")


def ids(messages: list[Published]) -> list[str]:
    """Return the ids of messages."""
    return [message.id for message in messages]


# Duplicates.


@pytest.mark.parametrize("name", [*SHARED_STORES, "local"])
def test_a_second_send_is_a_duplicate(name: str, sent: Sent, use_store: Any) -> None:
    """It publishes nothing and returns the result of the first; when the lock is free it goes."""
    use_store(name)
    first, second = once.delay(1), once.apply_async((), {"number": 1, "note": "again"})
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert second.id == first.id
    assert ids(sent()) == [first.id]
    lock = lock_of(1)
    assert lock is not None
    assert lock.holder.task_id == first.id
    assert release_lock(lock)
    third = once.delay(1)
    assert third.is_duplicate is False
    assert ids(sent()) == [third.id]


def test_other_keys_are_no_duplicates(sent: Sent) -> None:
    """Each key, and each task, has a lock of its own."""
    results = [once.delay(1), once.delay(2), loud.delay(1), deferring.delay(1)]
    assert [result.is_duplicate for result in results] == [False] * 4
    assert ids(sent()) == [result.id for result in results]


def test_only_a_unique_task_is_sent_once(sent: Sent) -> None:
    """Without unique_until, or on Celery's own base, each send is published and takes no lock."""
    results = [task.delay(1) for task in (add, alone, plain) for _ in range(2)]
    assert [getattr(result, "is_duplicate", None) for result in results] == [False] * 4 + [None] * 2
    messages = sent()
    assert ids(messages) == [result.id for result in results]
    assert [message.headers.get(HEADER) for message in messages] == [None] * 6
    assert list(iter_locks()) == []


def test_of_many_senders_one_publishes(sent: Sent) -> None:
    """Four processes send the same at once: one message, and all have its id."""
    told = run_in_processes(send_ten_times_together, 4)
    published = ids(sent())
    assert len(published) == 10
    for number, message_id in enumerate(published):
        assert {ids[number] for ids, _ in told} == {message_id}
    assert sum(fresh for _, fresh in told) == 10


def send_ten_times_together() -> tuple[list[str], int]:
    """Send ten numbers, each when all do; return the ids, and how many were no duplicates."""
    results = []
    for number in range(10):
        meet()
        results.append(app.tasks[once.name].delay(number))
    return [result.id for result in results], sum(not result.is_duplicate for result in results)


def test_calls_that_are_no_calls_take_no_lock(sent: Sent) -> None:
    """Arguments that don't fit or can't be sent raise, and the next send is not a duplicate."""
    with pytest.raises(TypeError, match="number"):
        once.delay()
    with pytest.raises(NotSerializable):
        once.delay(1, object())
    assert list(iter_locks()) == []
    assert once.delay(1).is_duplicate is False


def test_the_very_message_is_no_duplicate_of_itself(sent: Sent) -> None:
    """A run's re-send under its own id is published, under the token of the first."""
    assert once.apply_async((1,), task_id="the same").is_duplicate is False
    assert once.apply_async((1,), task_id="the same").is_duplicate is True
    messages = sent()
    with resending("the same"):
        assert once.apply_async((1,), task_id="the same").is_duplicate is False
    messages += sent()
    lock = lock_of(1)
    assert lock is not None
    assert [message.headers[HEADER]["sent"] for message in messages] == [lock.token] * 2


@pytest.mark.parametrize("until", ["start", "end"])
def test_a_retry_is_no_duplicate_of_its_run(until: str, locks_in_memory: None) -> None:
    """It carries the token on: others stay out until the "end", and may come in at the "start"."""
    with closing(Mailbox()) as mailbox:

        @single_instance(key="{number}", unique_until=until)
        def retried(self: Any, number: int) -> str:
            if self.request.retries == 0:
                raise self.retry(countdown=5)
            return "done"

        task = mailbox.task(retried, base=SafeTask, bind=True)
        task.delay(1)
        first = mailbox.take_one()
        assert mailbox.deliver(first).state == "RETRY"
        again = mailbox.take_one()
        assert again.id == first.id
        assert again.ours["sent"] == first.ours["sent"]
        other = task.delay(1)
        assert other.is_duplicate is (until == "end")
        assert mailbox.deliver(again) == ("SUCCESS", "done")
        # One that came in meanwhile keeps its lock.
        assert (lock_of(1, task) is not None) is (until == "start")


def test_eager_tasks_run_each_time(locks_in_memory: None) -> None:
    """There is no message that could be sent once."""
    with closing(Mailbox()) as mailbox:
        mailbox.app.conf.task_always_eager = True
        task = mailbox.task(
            single_instance(key="{number}", unique_until="end")(abs_of), base=SafeTask
        )
        results = [task.delay(-1) for _ in range(2)]
    assert [(result.get(), result.is_duplicate) for result in results] == [(1, False)] * 2
    assert list(iter_locks()) == []


def abs_of(number: int) -> int:
    """Return the absolute value."""
    return abs(number)


# On commit.


SENDS_LATER: dict[str, Callable[[int], Any]] = {
    "delay_on_commit": lambda number: once.delay_on_commit(number),
    "apply_async_on_commit": lambda number: once.apply_async_on_commit((number,), priority=3),
    "send_on_commit": lambda number: send_on_commit(once.si(number)),
    "task option": lambda number: deferring.delay(number),
}


@pytest.fixture(params=SENDS_LATER)
def send_later(request: pytest.FixtureRequest) -> Callable[[int], Any]:
    """Every way to send at the commit."""
    return SENDS_LATER[request.param]


def test_the_lock_is_taken_at_the_commit(send_later: Callable[[int], Any], sent: Sent) -> None:
    """Before it nobody knows whether the send is a duplicate, and there is no lock."""
    with transaction.atomic():
        result = send_later(1)
        announced = result.id
        assert result.is_duplicate is None
        assert list(iter_locks()) == []
    assert result.is_duplicate is False
    assert result.id == announced
    assert ids(sent()) == [announced]
    (lock,) = iter_locks()
    assert lock.holder.task_id == announced


def test_a_duplicate_shows_at_the_commit(send_later: Callable[[int], Any], sent: Sent) -> None:
    """The result becomes that of the one sent before, and nothing is published."""
    first = send_later(1)
    assert first.is_duplicate is False
    with hearing(task_sent, task_send_failed) as said, transaction.atomic():
        second = send_later(1)
        assert second.is_duplicate is None
        assert second.id != first.id
    assert second.is_duplicate is True
    assert second.id == first.id
    assert second.send_error is None
    assert said == []
    assert ids(sent()) == [first.id]


def test_one_transaction_sends_the_same_once(send_later: Callable[[int], Any], sent: Sent) -> None:
    """The second of two sends in one transaction is the duplicate."""
    with transaction.atomic():
        first, second, other = send_later(1), send_later(1), send_later(2)
        assert first.is_duplicate is second.is_duplicate is None
    assert [one.is_duplicate for one in (first, second, other)] == [False, True, False]
    assert second.id == first.id
    assert sorted(ids(sent())) == sorted([first.id, other.id])


def test_a_rollback_leaves_no_lock(send_later: Callable[[int], Any], sent: Sent) -> None:
    """A send that was rolled back, also to a savepoint, does not block later ones."""
    with rolled_back():
        lost = send_later(1)
    assert list(iter_locks()) == []
    with transaction.atomic():
        with rolled_back():
            lost_too = send_later(2)
        kept = send_later(2)
    assert (lost.is_duplicate, lost_too.is_duplicate, kept.is_duplicate) == (None, None, False)
    after = send_later(1)
    assert after.is_duplicate is False
    assert sorted(ids(sent())) == sorted([kept.id, after.id])


def test_autocommit_tells_at_once(send_later: Callable[[int], Any], sent: Sent) -> None:
    """Outside a transaction there is nothing to wait for."""
    first, second = send_later(1), send_later(1)
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert second.id == first.id
    assert ids(sent()) == [first.id]


def test_a_deferred_canvas_keeps_its_ids(sent: Sent) -> None:
    """Others wait for the result of a member, so the member is published, duplicate or not."""
    once.delay(1)
    sent()
    with transaction.atomic():
        several = send_on_commit(group(once.si(1), once.si(2), add.si(3)))
        linked = once.apply_async_on_commit((1,), link=add.si(1))
        announced = [*(one.id for one in several), linked.id]
        assert linked.is_duplicate is None
    assert ids(sent()) == announced
    assert [*(one.id for one in several), linked.id] == announced
    assert linked.is_duplicate is True


def test_a_lock_in_the_transactions_own_database_waits_for_the_commit(
    sent: Sent, settings: "Settings", postgres_alias: str
) -> None:
    """With LOCK_DATABASE the lock is taken after the commit; before it, that is an error."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": postgres_alias}  # type: ignore[arg-type]
    with transaction.atomic(using=postgres_alias):
        first = once.apply_async_on_commit((1,), using=postgres_alias)
        with pytest.raises(WrongTransaction):
            once.delay(2)
    assert first.is_duplicate is False
    with transaction.atomic(using=postgres_alias):
        second = once.apply_async_on_commit((1,), using=postgres_alias)
    assert second.id == first.id
    assert ids(sent()) == [first.id]


# on_duplicate="raise".


def test_a_duplicate_may_raise(sent: Sent) -> None:
    """AlreadySent names the lock and the task sent before, also after pickling."""
    first = loud.delay(1)
    for send in (loud.delay, loud.delay_on_commit, lambda n: send_on_commit(loud.si(n))):
        with pytest.raises(AlreadySent) as raised:
            send(1)
        for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
            assert (error.name, error.task_id) == (f"{loud.name}:1", first.id)
            assert 3600 - SLACK < error.remaining <= 3600
            assert f"'{loud.name}:1' was sent already, as task {first.id}" in str(error)
    assert ids(sent()) == [first.id]


@pytest.mark.parametrize(
    "send",
    [
        lambda: loud.delay_on_commit(1),
        lambda: loud.apply_async_on_commit((1,), countdown=5),
        lambda: send_on_commit(loud.si(1)),
    ],
)
def test_raising_and_waiting_for_the_commit_contradict(send: Callable[[], Any], sent: Sent) -> None:
    """At the commit it could not raise to the caller, so the call itself is a TypeError."""
    with transaction.atomic(), pytest.raises(TypeError, match=r'"raise".*on_duplicate="existing"'):
        send()
    assert sent() == []
    assert list(iter_locks()) == []


def test_a_canvas_does_not_raise(sent: Sent) -> None:
    """It would be sent in part: the duplicate is published, marked, and the rest with it."""
    first = loud.delay(1)
    results = [
        chain(loud.si(1), add.si(1)).delay(),
        group(loud.si(1), add.si(1)).delay(),
        loud.apply_async((1,), link=add.si(1)),
        loud.apply_async((1,), link_error=add.si(1)),
    ]
    with transaction.atomic():
        results.append(send_on_commit(chain(loud.si(1), add.si(1))))
    (_, *messages) = sent()
    marks = [m.headers[HEADER]["duplicate"] for m in messages if m.task == loud.name]
    assert marks == [first.id] * 5
    announced = set().union(*map(ids_in, results))
    assert {message.id for message in messages} <= announced


# Failures.


def refusing() -> str:
    """Return the URL of a Redis that is not there."""
    return f"redis://127.0.0.1:{dead_port()}/0"


@pytest.fixture
def without_broker(make_app: MakeApp) -> Any:
    """The unique task on an app whose broker refuses connections."""
    app = make_app(broker_url=refusing(), task_publish_retry_policy=ONE_TRY)
    return app.tasks[once.name]


def test_a_send_that_fails_frees_the_lock(without_broker: Any, sent: Sent) -> None:
    """The error reaches the caller as ever, and the next send is not a duplicate."""
    for _ in range(2):
        with pytest.raises(OperationalError):
            without_broker.delay(1)
        assert list(iter_locks()) == []
    assert once.delay(1).is_duplicate is False


def test_a_send_on_commit_that_fails_frees_the_lock(without_broker: Any, sent: Sent) -> None:
    """The error is kept and sent as a signal; neither of two equal sends is a duplicate."""
    with hearing(task_send_failed) as failures, transaction.atomic():
        results = [without_broker.delay_on_commit(1) for _ in range(2)]
    assert all(isinstance(result.send_error, OperationalError) for result in results)
    assert [failure["task_id"] for failure in failures] == [result.id for result in results]
    assert [result.is_duplicate for result in results] == [None, None]
    assert list(iter_locks()) == []
    assert once.delay(1).is_duplicate is False


def test_a_failing_send_leaves_the_lock_of_another(without_broker: Any, sent: Sent) -> None:
    """A duplicate needs no broker, and one of a canvas that fails frees what is not its own."""
    first = once.delay(1)
    assert without_broker.delay(1).id == first.id
    with pytest.raises(OperationalError):
        chain(without_broker.si(1), without_broker.si(2)).delay()
    lock = lock_of(1)
    assert lock is not None
    assert lock.holder.task_id == first.id


@pytest.fixture
def store_gone(settings: "Settings", locks: None) -> None:
    """No server listens where the locks should be."""
    nowhere = {"BACKEND": REDIS_BACKENDS["django-redis"], "LOCATION": refusing()}
    settings.CACHES = {**settings.CACHES, "default": nowhere}


@pytest.mark.usefixtures("store_gone")
@pytest.mark.parametrize(
    "send",
    [
        lambda: once.delay(1),
        lambda: once.delay_on_commit(1),
        lambda: chain(once.si(1), add.si(1)).delay(),
    ],
)
def test_without_the_lock_store_nothing_is_sent(send: Callable[[], Any], sent: Sent) -> None:
    """Whether it is a duplicate is not known: LockBackendError reaches the caller."""
    with pytest.raises(LockBackendError, match="did not answer to acquire"):
        send()
    assert sent() == []


@pytest.mark.usefixtures("store_gone")
def test_without_the_lock_store_others_of_the_commit_are_sent(sent: Sent) -> None:
    """The error is kept and told for the unique task alone."""
    with hearing(task_send_failed) as failures, transaction.atomic():
        before, unique, after = (
            add.delay_on_commit(1),
            once.delay_on_commit(1),
            add.delay_on_commit(2),
        )
        several = send_on_commit(group(once.si(1), add.si(2)))
    assert isinstance(unique.send_error, LockBackendError)
    assert isinstance(several.send_error, LockBackendError)
    assert (before.send_error, after.send_error) == (None, None)
    assert ids(sent()) == [before.id, after.id, several[1].id]
    assert [failure["task_id"] for failure in failures] == [unique.id, several[0].id]


# The lease.


def soon(seconds: float) -> datetime:
    """Return the moment in so many seconds."""
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize("on_commit", [False, True])
@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        (dict, 200),
        (lambda: {"countdown": 50}, 250),
        (lambda: {"eta": soon(50)}, 250),
        (lambda: {"eta": soon(-50)}, 200),
        (lambda: {"expires": 70}, 70),
        (lambda: {"expires": soon(70)}, 70),
        (lambda: {"expires": 4000}, 200),
        (lambda: {"countdown": 50, "expires": 230}, 230),
    ],
)
def test_the_lease_lasts_until_a_lost_message_is_given_up(
    options: Callable[[], dict[str, Any]],
    seconds: float,
    on_commit: bool,
    sent: Sent,
    settings: "Settings",
) -> None:
    """SENT_TIMEOUT plus the delay, and no longer than until the message expires."""
    settings.DJANGO_CELERY_SAFE = {"SENT_TIMEOUT": 200}  # type: ignore[arg-type]
    if on_commit:
        with transaction.atomic():
            once.apply_async_on_commit((1,), **options())
    else:
        once.apply_async((1,), **options())
    assert seconds - SLACK < remaining(lock_of(1)) <= seconds


@pytest.mark.parametrize(("options", "seconds"), [({}, 100), ({"countdown": 30}, 130)])
def test_the_task_has_its_own_lease_and_cache(
    options: dict[str, Any], seconds: float, sent: Sent
) -> None:
    """``sent_timeout`` and ``cache`` of the decorator travel with the message."""
    first, second = (elsewhere.apply_async((1,), **options) for _ in range(2))
    assert second.id == first.id
    (message,) = sent()
    header = message.headers[HEADER]
    assert list(iter_locks()) == []
    (lock,) = iter_locks(cache="locks")
    assert lock.name == f"sent:{elsewhere.name}:{header['key']}"
    assert seconds - SLACK < remaining(lock) <= seconds
    assert (header["sent_timeout"], header["cache"]) == (100, "locks")


def test_the_setting_may_be_a_timedelta(sent: Sent, settings: "Settings") -> None:
    """The setting may be a timedelta, like every duration."""
    settings.DJANGO_CELERY_SAFE = {"SENT_TIMEOUT": timedelta(minutes=3)}  # type: ignore[arg-type]
    once.delay(1)
    assert 180 - SLACK < remaining(lock_of(1)) <= 180


def test_an_hour_is_the_default(sent: Sent) -> None:
    """Nothing set: a lost message keeps others out for an hour."""
    once.delay(1)
    assert 3600 - SLACK < remaining(lock_of(1)) <= 3600


# Costs, and headers.


@pytest.fixture
def own_locks(settings: "Settings") -> Iterator[RedisServer]:
    """A Redis that has nothing but the locks."""
    with ServerPool() as servers:
        server: RedisServer = require(servers, RedisServer)
        backend = {"BACKEND": REDIS_BACKENDS["django-redis"], "LOCATION": server.url}
        settings.CACHES = {"default": backend}
        yield server


def test_a_send_asks_the_lock_store_once(own_locks: RedisServer, sent: Sent) -> None:
    """One round trip for each send, duplicate or not; none without unique_until."""
    once.delay(0)
    with own_locks.counting() as fresh:
        for number in range(1, 11):
            once.delay(number)
    with own_locks.counting() as duplicates:
        for number in range(1, 11):
            once.delay(number)
    with own_locks.counting() as on_commit, transaction.atomic():
        for number in range(11, 21):
            once.delay_on_commit(number)
    with own_locks.counting() as others:
        for number in range(10):
            alone.delay(number)
    trips = [count.round_trips for count in (fresh, duplicates, on_commit, others)]
    assert trips == [10, 10, 10, 0]


def test_the_message_carries_the_token_of_its_lock(sent: Sent) -> None:
    """So that any process that has the message can free exactly that lock."""
    once.apply_async((1,), headers={"ours": 1})
    group(once.si(2), once.si(2)).delay()
    single, member, duplicate = sent()
    locks = {number: lock_of(number) for number in (1, 2)}
    tokens = {number: lock.token for number, lock in locks.items() if lock is not None}
    assert single.headers["ours"] == 1
    one, two = ({"task": once.name, "key": key, "format": FORMAT} for key in "12")
    assert single.headers[HEADER] == {**one, "sent": tokens[1], "canvas": False}
    assert member.headers[HEADER] == {**two, "sent": tokens[2], "canvas": True}
    marked = duplicate.headers[HEADER]
    assert marked.pop("sent") != tokens[2]
    assert marked == {**two, "canvas": True, "duplicate": member.id}


def test_a_unique_message_is_a_plain_one_but_for_our_header(
    sent: Sent, redis_server: RedisServer
) -> None:
    """Routing, options and body are those of the same send without unique_until."""
    forms = []
    for task in (once, alone):
        task.apply_async(
            (1,), task_id="an-id", queue="slow", priority=3, headers={"ours": [1]}, shadow="other"
        )
        (message,) = sent()
        form = message.comparable()
        form["headers"] = {
            name: value
            for name, value in message.headers.items()
            if name not in (HEADER, "task", "stamps")
        }
        forms.append(form)
    assert forms[0] == forms[1]


def test_a_publication_is_announced_once(sent: Sent) -> None:
    """Celery's after_task_publish comes for what was published, and for no duplicate."""
    with hearing(after_task_publish) as said:
        first, _ = once.delay(1), once.delay(1)
        with transaction.atomic():
            once.delay_on_commit(1)
            second = once.delay_on_commit(2)
    assert [one["headers"]["id"] for one in said] == [first.id, second.id]


def test_a_receiver_may_send_a_task_itself(sent: Sent) -> None:
    """A send by a receiver of before_task_publish goes out, too, as with a plain task."""

    def audit(sender: str, **said: Any) -> None:
        if sender != add.name:
            add.delay(1)

    before_task_publish.connect(audit, weak=False)
    try:
        for task in (alone, once):
            result = task.delay(1)
            messages = sent()
            assert sorted(message.task for message in messages) == sorted([task.name, add.name])
            assert result.id in ids(messages)
    finally:
        before_task_publish.disconnect(audit)


def test_a_duplicate_is_told(sent: Sent, caplog: pytest.LogCaptureFixture) -> None:
    """Signal and record at INFO name the lock, both tasks, and whether it was published."""
    caplog.set_level(logging.INFO, "django_celery_safe")
    told = []
    with hearing(task_duplicate) as heard:
        first = once.delay(1)
        assert heard == []
        once.apply_async((1,), task_id="dropped")
        once.apply_async((1,), task_id="linked", link=add.si(1))
        with transaction.atomic():
            once.apply_async_on_commit((1,), task_id="on commit")
    for one in heard:
        del one["signal"], one["sender"]
        told.append(one)
    assert told == [
        {
            "name": f"{once.name}:1",
            "task": once.name,
            "task_id": task_id,
            "sent_id": first.id,
            "published": task_id == "linked",
        }
        for task_id in ("dropped", "linked", "on commit")
    ]
    records = [record for record in caplog.records if record.name.endswith(".task_duplicate")]
    assert [record.levelno for record in records] == [logging.INFO] * 3
    for record, fields in zip(records, told, strict=True):
        assert {f"safe_{name}": value for name, value in fields.items()}.items() <= vars(
            record
        ).items()
        assert f"was sent before, as task {first.id}" in record.getMessage()


# The caller's connection, and the pool's.


def test_the_callers_connection_publishes(
    broker: Celery, redis_server: RedisServer, sent: Sent
) -> None:
    """``connection=`` and ``producer=`` publish as ever; a duplicate is one over any of them."""
    with (
        broker.connection_for_write(redis_server.database_url(3)) as connection,
        broker.amqp.Producer(connection) as producer,
    ):
        results = [
            once.apply_async((1,), connection=connection),
            once.apply_async((2,), producer=producer),
        ]
        with transaction.atomic():
            results.append(once.apply_async_on_commit((3,), connection=connection))
            results.append(once.apply_async_on_commit((4,), producer=producer))
        duplicates = [once.apply_async((n,), connection=connection) for n in range(1, 5)]
        duplicates += [once.delay(n) for n in range(1, 5)]
    assert ids(take_published(redis_server, 3)) == [result.id for result in results]
    assert sent() == []
    assert [one.id for one in duplicates] == [one.id for one in results] * 2


def send_with_one_connection(kind: str, broker_url: str, result_backend: str) -> list[Any]:
    """Send two tasks, in some form, by an app that may connect once; return what is announced."""
    own = Celery("own", broker=broker_url, backend=result_backend, set_as_current=False)
    own.conf.broker_pool_limit = 1
    task = own.tasks[once.name]
    signature: Signature[Any] = {
        "task": lambda: task.si(1),
        "chain": lambda: chain(task.si(1), task.si(2)),
        "group": lambda: group(task.si(1), task.si(1), task.si(2)),
        "group of groups": lambda: group(group(task.si(1), task.si(2)), task.si(1)),
    }[kind]()
    with closing(own):
        return sorted(ids_in(signature.apply_async()))


@pytest.mark.parametrize("kind", ["task", "chain", "group", "group of groups"])
def test_a_pool_of_one_connection_is_enough(
    kind: str, redis_server: RedisServer, sent: Sent
) -> None:
    """A group keeps the pool's connection while its members are sent: none needs a second."""
    urls = [redis_server.database_url(number) for number in (1, 2)]
    with start_in_process(send_with_one_connection, kind, *urls) as sending:
        announced = sending.result(20)
    published = ids(sent())
    assert len(published) == {"task": 1, "chain": 1}.get(kind, 3)
    assert set(published) <= set(announced)


# After a duplicate.


@pytest.mark.parametrize("on_commit", [False, True])
def test_a_duplicate_leaves_no_subscription(on_commit: bool, broker: Celery, sent: Sent) -> None:
    """The result backend listens for what was published, and for nothing else."""
    consumer = broker.backend.result_consumer
    before = set(consumer.subscribed_to)
    first = once.delay(1)
    if on_commit:
        with transaction.atomic():
            duplicates = [once.delay_on_commit(1) for _ in range(3)]
    else:
        duplicates = [once.delay(1) for _ in range(3)]
    assert consumer.subscribed_to - before == {broker.backend.get_key_for_task(first.id)}
    assert {one.id for one in duplicates} == {first.id}


def sends_twice(task: Any) -> None:
    """Send the same twice."""
    task.delay(1)
    task.delay(1)


def sends_twice_on_commit(task: Any) -> None:
    """Send the same twice in a transaction."""
    with transaction.atomic():
        task.delay_on_commit(1)
        task.delay_on_commit(1)


def raises_at_the_second(task: Any) -> None:
    """Send the same twice, and know of it."""
    task.delay(1)
    with pytest.raises(AlreadySent):
        task.delay(1)


def fails(task: Any) -> None:
    """Send something that can't be sent."""
    with pytest.raises(LockBackendError):
        task.delay(1)


@pytest.mark.parametrize(
    ("send", "options", "count"),
    [
        (sends_twice, {}, 1),
        (sends_twice_on_commit, {}, 1),
        (raises_at_the_second, {"on_duplicate": "raise"}, 1),
        (fails, {"cache": "gone"}, 0),
    ],
)
def test_no_child_of_a_task_never_ends(
    send: Callable[[Any], None], options: dict[str, Any], count: int, settings: "Settings"
) -> None:
    """In the trail of the task that sends it stands only what was published."""
    nowhere = {"BACKEND": REDIS_BACKENDS["django-redis"], "LOCATION": refusing()}
    settings.CACHES = {**settings.CACHES, "gone": nowhere}
    with closing(Mailbox()) as mailbox:
        children: list[str] = []
        unique = mailbox.task(single_instance(unique_until="end", **options)(abs_of), base=SafeTask)

        def parent(self: Any) -> None:
            send(unique)
            children.extend(child.id for child in self.request.children)

        mailbox.task(parent, base=SafeTask, bind=True).delay()
        assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", None)
        published = [message.id for message in mailbox.take()]
    assert len(published) == count
    assert set(children) == set(published)
