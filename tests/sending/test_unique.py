"""Tasks with ``unique_until``, sent without a worker: duplicates, and locks that stay."""

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery, chain, group, shared_task
from django.db import transaction
from kombu.exceptions import OperationalError
from pytest_django import Settings

from django_celery_safe import (
    ConfigurationError,
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
from django_celery_safe.delivery.header import HEADER
from django_celery_safe.signals import task_duplicate, task_send_failed, task_sent
from tests.app.celery import app
from tests.app.tasks import add
from tests.caches import cache_at
from tests.concurrency.mailbox import Mailbox
from tests.contract.conftest import params
from tests.locks.renewals import get_lock
from tests.processes import meet, run_in_processes, start_in_process
from tests.sending.conftest import hearing, ids, refusing, rolled_back
from tests.sending.published import Sent, ids_in
from tests.servers import RedisServer

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("in_redis")]

#: Seconds that a test may take between a send and a look at its lock.
SLACK = 15


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="end")
def once(number: int, note: str = "") -> int:
    """Be sent once for each number."""
    return number


@shared_task(base=SafeTask, send_on_commit=True)
@single_instance(key="{number}", unique_until="end")
def deferring(number: int) -> None:
    """Be sent once, at the commit, by every send."""


@shared_task(base=SafeTask)
@single_instance(key="{number}")
def alone(number: int) -> None:
    """Run alone, and be sent as often as one likes."""


@shared_task
@single_instance(key="{number}", unique_until="end")
def plain(number: int) -> None:
    """Have Celery's own base, which knows of no lock at the send."""


def lock_of(number: int, name: str = once.name) -> HeldLock:
    """Return the lock that the message for this number holds."""
    return get_lock(f"sent:{name}:{number}")


# Duplicates.


@pytest.mark.parametrize("name", params("django-redis", "memcached", "database", "local"))
def test_a_second_send_is_a_duplicate(name: str, sent: Sent, use_store: Any) -> None:
    """It publishes nothing and returns the result of the first; when the lock is free it goes."""
    use_store(name)
    first, second = once.delay(1), once.apply_async((), {"number": 1, "note": "again"})
    assert (first.is_duplicate, second.is_duplicate) == (False, True)
    assert second.id == first.id
    assert ids(sent()) == [first.id]
    assert lock_of(1).holder.task_id == first.id
    assert release_lock(lock_of(1))
    third = once.delay(1)
    assert third.is_duplicate is False
    assert ids(sent()) == [third.id]


def test_only_equal_sends_of_a_unique_task_are_duplicates(sent: Sent) -> None:
    """Not those of other keys or tasks, without unique_until, or on Celery's own base."""
    unique = [once.delay(1), once.delay(2), deferring.delay(1)]
    assert [result.is_duplicate for result in unique] == [False] * 3
    assert (len(sent()), len(list(iter_locks()))) == (3, 3)
    results = [task.delay(3) for task in (add, alone, plain) for _ in range(2)]
    assert [getattr(result, "is_duplicate", None) for result in results] == [False] * 4 + [None] * 2
    messages = sent()
    assert ids(messages) == [result.id for result in results]
    assert [message.headers.get(HEADER) for message in messages] == [None] * 6
    assert len(list(iter_locks())) == 3


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


def retrying(self: Any, number: int) -> int:
    """Retry once."""
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return number


@pytest.mark.parametrize("until", ["start", "end"])
@pytest.mark.parametrize("store", ["django-redis", "local"])
def test_a_retry_is_no_duplicate_of_its_run(
    store: str, until: str, mailbox: Mailbox, use_store: Any
) -> None:
    """It carries the token on: others stay out until the "end", and may come in at the "start"."""
    use_store(store)
    unique = single_instance(key="{number}", unique_until=until)(retrying)
    task = mailbox.task(unique, base=SafeTask, bind=True)
    task.delay(1)
    first = mailbox.take_one()
    assert mailbox.deliver(first).state == "RETRY"
    again = mailbox.take_one()
    assert again.id == first.id
    assert again.ours["sent"] == first.ours["sent"]
    assert task.delay(1).is_duplicate is (until == "end")
    assert mailbox.deliver(again) == ("SUCCESS", 1)
    # One that came in meanwhile keeps its lock.
    assert (find_lock(f"sent:{task.name}:1") is not None) is (until == "start")


# On commit.


@pytest.mark.parametrize("way", ["delay_on_commit", "task option"])
def test_the_commit_finds_the_duplicates(way: str, sent: Sent) -> None:
    """Before it nobody knows, and there is no lock; the result becomes that of the first send."""
    send_later = deferring.delay if way == "task option" else once.delay_on_commit
    with hearing(task_sent, task_send_failed) as told, transaction.atomic():
        first, second, other = send_later(1), send_later(1), send_later(2)
        announced = first.id, other.id
        assert {one.is_duplicate for one in (first, second, other)} == {None}
        assert second.id != first.id
        assert list(iter_locks()) == []
    assert [one.is_duplicate for one in (first, second, other)] == [False, True, False]
    assert (first.id, other.id) == announced
    # Outside a transaction there is nothing to wait for.
    third = send_later(1)
    assert third.is_duplicate is True
    assert second.id == third.id == first.id
    assert second.send_error is None
    assert [one["signal"] for one in told] == [task_sent] * 2
    assert sorted(ids(sent())) == sorted(announced)
    assert {lock.holder.task_id for lock in iter_locks()} == set(announced)


def test_a_rollback_leaves_no_lock(sent: Sent) -> None:
    """A send that was rolled back, also to a savepoint, does not block later ones."""
    with rolled_back():
        lost = once.delay_on_commit(1)
    assert list(iter_locks()) == []
    with transaction.atomic():
        with rolled_back():
            lost_too = once.delay_on_commit(2)
        kept = once.delay_on_commit(2)
    assert (lost.is_duplicate, lost_too.is_duplicate, kept.is_duplicate) == (None, None, False)
    assert once.delay(1).is_duplicate is False
    assert len(sent()) == 2


def test_a_lock_in_the_transactions_own_database_waits_for_the_commit(
    sent: Sent, settings: Settings, db_alias: str
) -> None:
    """With LOCK_DATABASE the lock is taken after the commit; before it, that is an error."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": db_alias}  # type: ignore[arg-type]
    with transaction.atomic(using=db_alias):
        first = once.apply_async_on_commit((1,), using=db_alias)
        with pytest.raises(WrongTransaction):
            once.delay(2)
    assert first.is_duplicate is False
    with transaction.atomic(using=db_alias):
        second = once.apply_async_on_commit((1,), using=db_alias)
    assert second.id == first.id
    assert ids(sent()) == [first.id]


def test_a_duplicate_in_a_canvas_is_published(sent: Sent) -> None:
    """Others wait for its parts: the duplicate is published, marked, and the rest with it."""
    first = once.delay(1)
    results = [
        chain(once.si(1), add.si(1)).delay(),
        group(once.si(1), add.si(1)).delay(),
        once.apply_async((1,), link_error=add.si(1)),
    ]
    with transaction.atomic():
        results.append(send_on_commit(group(once.si(1), once.si(2), add.si(1))))
        results.append(once.apply_async_on_commit((1,), link=add.si(1)))
    announced = set().union(*map(ids_in, results))
    (_, *messages) = sent()
    marks = [m.headers[HEADER].get("duplicate") for m in messages if m.task == once.name]
    assert marks == [*[first.id] * 4, None, first.id]
    assert {message.id for message in messages} <= announced


# Failures.


def test_a_send_that_fails_frees_the_lock(without_broker: Celery, sent: Sent) -> None:
    """The error reaches the caller, or is kept at a commit, and no later send is a duplicate."""
    task = without_broker.tasks[once.name]
    for _ in range(2):
        with pytest.raises(OperationalError):
            task.delay(1)
        assert list(iter_locks()) == []
    with hearing(task_send_failed) as failures, transaction.atomic():
        results = [task.delay_on_commit(1) for _ in range(2)]
    assert all(isinstance(result.send_error, OperationalError) for result in results)
    assert [failure["task_id"] for failure in failures] == [result.id for result in results]
    assert [result.is_duplicate for result in results] == [None, None]
    assert list(iter_locks()) == []
    first = once.delay(1)
    assert first.is_duplicate is False
    # A duplicate needs no broker, and one of a canvas that fails frees what is its own alone.
    assert task.delay(1).id == first.id
    with pytest.raises(OperationalError):
        chain(task.si(1), task.si(2)).delay()
    assert lock_of(1).holder.task_id == first.id


def test_without_the_lock_store_nothing_unique_is_sent(sent: Sent, settings: Settings) -> None:
    """Whether it is a duplicate is not known: the caller gets the error, and others are sent."""
    settings.CACHES = cache_at(refusing())
    for signature in (once.si(1), chain(once.si(1), add.si(1))):
        with pytest.raises(LockBackendError, match="did not answer to acquire"):
            signature.delay()
    with hearing(task_send_failed) as failures, transaction.atomic():
        before, unique = add.delay_on_commit(1), once.delay_on_commit(1)
        several = send_on_commit(group(once.si(1), add.si(2)))
    assert isinstance(unique.send_error, LockBackendError)
    assert isinstance(several.send_error, LockBackendError)
    assert before.send_error is None
    assert ids(sent()) == [before.id, several[1].id]
    assert [failure["task_id"] for failure in failures] == [unique.id, several[0].id]


# The lease.


def soon(seconds: float) -> datetime:
    """Return the moment in so many seconds."""
    return datetime.now(UTC) + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("setting", "on_commit", "options", "seconds"),
    [
        (None, False, dict, 3600),
        (timedelta(seconds=200), True, lambda: {"countdown": 50}, 250),
        (200, False, lambda: {"eta": soon(50)}, 250),
        (200, True, lambda: {"eta": soon(-50)}, 200),
        (200, False, lambda: {"expires": soon(70)}, 70),
        (200, True, lambda: {"countdown": 50, "expires": 230}, 230),
        (200, False, lambda: {"expires": 4000}, 200),
    ],
)
def test_the_lease_lasts_until_a_lost_message_is_given_up(
    setting: Any,
    on_commit: bool,
    options: Callable[[], dict[str, Any]],
    seconds: float,
    sent: Sent,
    settings: Settings,
) -> None:
    """SENT_TIMEOUT plus the delay, and no longer than until the message expires."""
    settings.DJANGO_CELERY_SAFE = {} if setting is None else {"SENT_TIMEOUT": setting}
    send = once.apply_async_on_commit if on_commit else once.apply_async
    with transaction.atomic():
        send((1,), **options())
    assert seconds - SLACK < lock_of(1).remaining <= seconds


def test_a_duplicate_is_told(sent: Sent) -> None:
    """A signal names the lock, both tasks, and whether the duplicate was published."""
    with hearing(task_duplicate) as heard:
        first = once.delay(1)
        assert heard == []
        once.apply_async((1,), task_id="dropped")
        once.apply_async((1,), task_id="linked", link=add.si(1))
        with transaction.atomic():
            once.apply_async_on_commit((1,), task_id="on commit")
    told = [(one["task_id"], one["sent_id"], one["published"], one["name"]) for one in heard]
    assert told == [
        (task_id, first.id, task_id == "linked", f"{once.name}:1")
        for task_id in ("dropped", "linked", "on commit")
    ]


# The caller's connection, and the pool's.


def send_with_one_connection(broker_url: str, result_backend: str) -> list[Any]:
    """Send a group of groups by an app that may connect once; return what is announced."""
    own = Celery("own", broker=broker_url, backend=result_backend, set_as_current=False)
    own.conf.broker_pool_limit = 1
    task = own.tasks[once.name]
    with closing(own):
        return sorted(ids_in(group(group(task.si(1), task.si(2)), task.si(1)).apply_async()))


def test_a_pool_of_one_connection_is_enough(redis_server: RedisServer, sent: Sent) -> None:
    """A group keeps the pool's connection while its members are sent: none needs a second."""
    urls = [redis_server.database_url(number) for number in (1, 2)]
    with start_in_process(send_with_one_connection, *urls) as sending:
        announced = sending.result(60)
    published = ids(sent())
    assert len(published) == 3
    assert set(published) <= set(announced)


# Once per period, whether or not the first run ends.


NAME = "tests.periodic"
#: A period that no test outlives, s.
PERIOD = 600


def nothing(number: int) -> None:
    """Do nothing."""


def failing(self: Any, number: int) -> None:
    """Fail."""
    raise ValueError(number)


@pytest.mark.parametrize(("function", "state"), [(failing, "FAILURE"), (retrying, "RETRY")])
def test_no_end_of_a_run_ends_the_period(
    function: Callable[..., Any], state: str, mailbox: Mailbox
) -> None:
    """The lock is neither freed, nor moved, nor renewed; the first's own retry passes."""
    decorate = single_instance(key="{number}", unique_until=PERIOD, timeout=5)
    task = mailbox.task(decorate(function), base=SafeTask, bind=True, name=NAME)
    first = task.delay(1)
    before = lock_of(1, NAME)
    assert mailbox.deliver(mailbox.take_one()).state == state
    again = mailbox.take()
    assert len(again) == (state == "RETRY")
    for message in again:
        assert mailbox.deliver(message) == ("SUCCESS", 1)
    after = lock_of(1, NAME)
    assert (after.token, after.holder) == (before.token, before.holder)
    assert PERIOD - SLACK < after.remaining <= before.remaining
    assert not after.holder.renewed
    assert task.delay(1).id == first.id
    assert mailbox.take() == []


@pytest.mark.parametrize(
    "options", [{"countdown": 5000}, {"expires": datetime.now(UTC) - timedelta(days=1)}]
)
def test_the_period_begins_at_the_send(options: dict[str, Any], mailbox: Mailbox) -> None:
    """Neither the message's eta nor its expiry makes it longer or shorter."""
    once = single_instance(key="{number}", unique_until=timedelta(seconds=PERIOD))
    task = mailbox.task(once(nothing), base=SafeTask, name=NAME)
    task.apply_async((1,), **options)
    assert PERIOD - SLACK < lock_of(1, NAME).remaining <= PERIOD
    assert [task.delay(number).is_duplicate for number in (1, 2)] == [True, False]
    assert release_lock(lock_of(1, NAME))
    assert task.delay(1).is_duplicate is False


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"unique_until": 0}, "unique_until=0"),
        ({"unique_until": 10**400}, "unique_until="),  # too large for a float
        ({"unique_until": timedelta(days=400)}, "at most a year"),
        ({"unique_until": "10 min"}, "'10 min'"),
    ],
)
def test_a_period_without_a_meaning_is_refused(options: dict[str, Any], sentence: str) -> None:
    """The error comes at import, and shows the option."""
    with pytest.raises(ConfigurationError, match=sentence):
        single_instance(**options)


@pytest.mark.parametrize(("name", "seconds"), [("memcached", 31 * 24 * 3600), ("portable", 1)])
def test_a_period_that_the_store_cant_keep_is_refused_at_the_send(
    name: str, seconds: float, use_store: Callable[[str], None]
) -> None:
    """The period is not adjusted: nothing is sent, and there is no lock."""
    use_store(name)
    once = single_instance(unique_until=seconds)(nothing)
    with closing(Mailbox()) as mailbox:
        task = mailbox.task(once, base=SafeTask, name=NAME)
        with pytest.raises(ConfigurationError, match="can't be kept in"):
            task.delay(1)
        assert mailbox.take() == []
    assert find_lock(f"sent:{task.lock_name(1)}") is None


# After a duplicate.


def test_no_child_of_a_task_never_ends(mailbox: Mailbox) -> None:
    """In the trail of the task that sends it stands only what was published."""
    task = mailbox.task(single_instance(unique_until="end")(retrying), base=SafeTask, bind=True)
    children: list[str] = []

    def parent(self: Any) -> None:
        task.delay(1)
        task.delay(1)
        with transaction.atomic():
            task.delay_on_commit(1)
        children.extend(child.id for child in self.request.children)

    mailbox.task(parent, base=SafeTask, bind=True).delay()
    assert mailbox.deliver(mailbox.take_one()) == ("SUCCESS", None)
    assert set(children) == {mailbox.take_one().id}


# Re-sends.


def test_one_id_used_twice_is_a_duplicate(mailbox: Mailbox) -> None:
    """An id of the caller's own makes the second send no message of a run sent again."""
    unique = single_instance(key="{number}", unique_until="end")(retrying)
    task = mailbox.task(unique, base=SafeTask, bind=True)
    results = [task.apply_async((number,), task_id="own") for number in (7, 7, 8)]
    assert [result.id for result in results] == ["own"] * 3
    assert [result.is_duplicate for result in results] == [False, True, False]
    first, other = mailbox.take()
    assert [first.args, other.args] == [[7], [8]]


# Eager tasks.


def make_eager(mailbox: Mailbox, runs: list[int], **options: Any) -> Any:
    """Return a task that sends itself once more while it runs."""
    mailbox.app.conf.task_always_eager = True

    def work(x: int, sends: bool = False) -> bool | None:
        runs.append(x)
        return task.delay(x).is_duplicate if sends else None

    alone = single_instance(key="{x}", on_conflict="skip", **options)
    task = mailbox.task(alone(work), base=SafeTask, name="tests.eager")
    return task


@pytest.mark.parametrize(("until", "is_duplicate"), [("end", True), ("start", False)])
def test_an_eager_send_counts_until_its_run_starts_or_ends(
    until: Any, is_duplicate: bool, mailbox: Mailbox
) -> None:
    """A send from its own run is a duplicate, or not; afterwards it is sent again."""
    task = make_eager(mailbox, [], unique_until=until)
    for _ in range(2):
        result = task.delay(5, sends=True)
        assert (result.is_duplicate, result.get()) == (False, is_duplicate)
        assert list(iter_locks()) == []


def test_the_commit_finds_the_duplicates_of_eager_tasks(mailbox: Mailbox) -> None:
    """A send that waits for it takes no lock before; a period holds for eager tasks, too."""
    runs: list[int] = []
    task = make_eager(mailbox, runs, unique_until=600)
    with transaction.atomic():
        first, again, other = (task.delay_on_commit(x) for x in (5, 5, 6))
        assert [first.is_duplicate, again.is_duplicate, runs] == [None, None, []]
        assert list(iter_locks()) == []
    assert [one.is_duplicate for one in (first, again, other)] == [False, True, False]
    assert (again.id, runs) == (first.id, [5, 6])
    assert task.delay(5).is_duplicate


def test_a_period_holds_whatever_became_of_an_eager_run(mailbox: Mailbox) -> None:
    """An error that leaves the call does not let the next one run."""
    mailbox.app.conf.update(task_always_eager=True, task_eager_propagates=True)
    once = single_instance(unique_until=600)(failing)
    task = mailbox.task(once, base=SafeTask, bind=True, name="tests.fails")
    with pytest.raises(ValueError, match="1"):
        task.delay(1)
    assert task.delay(1).is_duplicate
