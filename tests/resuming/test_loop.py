"""``resumable()`` in carried tasks: what each end of a run leaves of its chunks."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections, transaction
from django.db.models import Q
from django.test.utils import CaptureQueriesContext

from django_celery_safe import (
    ClaimLost,
    ConfigurationError,
    WrongTransaction,
    current_claim,
    resumable,
    resumed_at,
)
from tests.app.models import Account, Customer, Person, Ticket, Voucher
from tests.resuming.loops import die_after, fill, loop, write, written
from tests.sending.carrying import Carried, leave_dead

EACH_ONCE = dict.fromkeys(range(1, 11), 1)


@pytest.mark.sql
def test_a_killed_loop_goes_on_behind_its_last_chunk(carried: Carried) -> None:
    """Each row is written to once, however many processes die; one without a chunk counts."""
    people, message = fill(carried.alias, range(1, 11)), carried.send()
    for count, deaths, done in [(2, 0, 0), (1, 1, 0), (7, 0, 6), (1, 1, 6)]:
        die_after(carried, message, count, people, every=3)
        assert (carried.row.deaths, sum(written(carried.alias).values())) == (deaths, done)
        (message,) = carried.relay()
    assert carried.row.deaths == 2
    carried.body = loop(people, every=3)
    assert carried.mailbox.deliver(message) == ("SUCCESS", "done")
    assert written(carried.alias) == EACH_ONCE
    assert not carried.rows.exists()


def make_tickets(alias: str) -> None:
    """Make rows whose key is a UUID."""
    Ticket.objects.using(alias).bulk_create([Ticket() for _ in range(10)])


def make_vouchers(alias: str) -> None:
    """Make rows whose key is a text."""
    Voucher.objects.using(alias).bulk_create([Voucher(code=f"é {n}") for n in range(10)])


def make_customers(alias: str) -> None:
    """Make rows whose key is that of another table."""
    for _ in range(10):
        Customer.objects.using(alias).create()


@pytest.mark.sql
@pytest.mark.parametrize(
    ("make", "model"),
    [(make_tickets, Ticket), (make_vouchers, Voucher), (make_customers, Customer)],
)
def test_any_unique_key_can_be_walked(
    carried: Carried, make: Callable[[str], None], model: Any
) -> None:
    """A key may be a text, a UUID or another row."""
    make(carried.alias)
    rows, seen, message = model.objects.using(carried.alias), list[Any](), carried.send()
    die_after(carried, message, 5, rows.all(), every=2, do=lambda row: seen.append(row.pk))
    (again,) = carried.relay()
    carried.body = loop(rows.all(), every=2, do=lambda row: seen.append(row.pk))
    assert carried.mailbox.deliver(again).state == "SUCCESS"
    assert seen[:4] + seen[5:] == list(rows.order_by("pk").values_list("pk", flat=True))


@pytest.mark.sql
def test_rows_may_come_and_go_meanwhile(carried: Carried) -> None:
    """Deleted rows shift nothing, new rows behind the place are walked, and filters hold."""
    people = fill(carried.alias, range(1, 11)).filter(pk__lt=100)
    message = carried.send()
    die_after(carried, message, 5, people, every=2)
    people.filter(pk__in=[1, 3, 5, 6]).delete()
    fill(carried.alias, [-1, 11, 100])
    (again,) = carried.relay()
    carried.body = loop(people, every=2)
    assert carried.mailbox.deliver(again).state == "SUCCESS"
    assert written(carried.alias) == {-1: 0, 2: 1, 4: 1, 7: 1, 8: 1, 9: 1, 10: 1, 11: 1, 100: 0}


@pytest.mark.sql
def test_a_row_that_a_join_returns_twice_is_walked_once(carried: Carried) -> None:
    """Also if its two places are in two chunks."""
    rows, seen = Account.objects.using(carried.alias), list[Any]()
    for _ in range(3):
        rows.create()
    twice = rows.filter(Q(pk__gt=0)).extra(tables=["app_voucher"])
    make_vouchers(carried.alias)
    carried.body = loop(twice, every=4, do=lambda row: seen.append(row.pk))
    assert carried.mailbox.deliver(carried.send()).state == "SUCCESS"
    assert seen == list(rows.order_by("pk").values_list("pk", flat=True))


@pytest.mark.sql
def test_a_chunk_costs_two_statements(carried: Carried) -> None:
    """One reads its rows, one writes the cursor; the first also reads the cursor, and counts."""
    people = fill(carried.alias, range(1, 11))
    carried.body = loop(people, every=5, do=lambda row: None)
    message = carried.send()
    with CaptureQueriesContext(connections[carried.alias]) as queries:
        carried.mailbox.deliver(message)
    reads = [one["sql"] for one in queries if "app_person" in one["sql"]]
    ours = [one["sql"] for one in queries if "checkpoint_at = " in one["sql"]]
    assert (len(reads), len(ours)) == (1 + 3, 2)


@pytest.mark.parametrize("items", [range(10), list(range(10)), tuple(range(10))])
def test_a_sequence_is_walked_by_its_index(carried: Carried, items: Any) -> None:
    """The same as with rows; what is not in the database is repeated for one chunk."""
    seen, message = list[int](), carried.send()
    die_after(carried, message, 5, items, every=3, do=seen.append)
    (again,) = carried.relay()
    carried.body = loop(items, every=3, do=seen.append)
    assert carried.mailbox.deliver(again) == ("SUCCESS", "done")
    assert seen == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9]


# What does not fit.


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (range(10), range(4), "the list has 4 items now, of 10"),
        (range(10), Person, "the code walks app.person by id"),
        (Person, Ticket, "the code walks app.ticket by id"),
        (Person, range(10), "the code walks a list"),
        (Person, None, "the code walks checkpoint()"),
    ],
)
def test_a_cursor_that_does_not_fit_is_an_error(
    carried: Carried, before: Any, after: Any, said: str
) -> None:
    """The task fails, and nothing is done: never a silent start."""

    def find(what: Any) -> Any:
        manager = {Person: Person.everyone, Ticket: Ticket.objects}.get(what)
        return what if manager is None else manager.using(carried.alias).all()

    fill(carried.alias, range(1, 11))
    make_tickets(carried.alias)
    die_after(carried, carried.send(), 5, find(before), every=2, do=lambda item: None)
    (again,) = carried.relay()
    seen = list[Any]()
    carried.body = loop(find(after), do=seen.append) if after else lambda task: resumed_at()
    state, error = carried.mailbox.deliver(again)
    assert (state, type(error), seen) == ("FAILURE", ConfigurationError, [])
    assert said in str(error)
    assert carried.row.state == "failed"


def test_a_key_of_another_type_is_an_error(carried: Carried) -> None:
    """As after a migration from numbers to UUIDs."""
    people = fill(carried.alias, range(1, 11))
    die_after(carried, carried.send(), 5, people, every=2, do=lambda item: None)
    carried.rows.update(cursor=carried.row.cursor.replace("app.person by id", "app.ticket by id"))
    (again,) = carried.relay()
    carried.body = loop(Ticket.objects.using(carried.alias).all())
    state, error = carried.mailbox.deliver(again)
    assert state == "FAILURE"
    assert "the key is now a UUIDField" in str(error)


def test_a_second_loop_is_an_error(carried: Carried) -> None:
    """A task has one cursor."""
    people = fill(carried.alias, range(1, 11))

    def body(task: Any) -> None:
        for row in resumable(people):
            write(row)
        for row in resumable(people):
            write(row)

    carried.body = body
    state, error = carried.mailbox.deliver(carried.send())
    assert (state, type(error)) == ("FAILURE", ConfigurationError)
    assert "can't keep a second" in str(error)
    assert written(carried.alias) == EACH_ONCE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.order_by("email"), "order_by"),
        (lambda rows: rows.reverse(), "order_by"),
        (lambda rows: rows.distinct(), "distinct"),
        (lambda rows: rows.all()[:5], "slice"),
        (lambda rows: rows.union(rows), "union"),
        (lambda rows: rows.values("pk"), "values"),
        (lambda rows: rows.iterator(), "generator"),
        (lambda rows: "text", "str"),
        (lambda rows: {1, 2}, "set"),
    ],
)
def test_what_has_no_places_is_refused(change: Callable[[Any], Any], said: str) -> None:
    """At the call, with what to do instead."""
    with pytest.raises(ConfigurationError, match=said):
        resumable(change(Person.everyone.all()))


@pytest.mark.parametrize("key", ["email", "is_welcome_email_sent", "invited_at"])
def test_a_key_has_to_be_unique(key: str) -> None:
    """Otherwise rows would be left out."""
    with pytest.raises(ConfigurationError, match=key):
        resumable(Person.everyone.all(), key=key)


@pytest.mark.parametrize("every", [0, -1, 2.5, True, None])
def test_a_chunk_has_a_size(every: Any) -> None:
    """Refused at the call."""
    with pytest.raises(ConfigurationError, match="every="):
        resumable(range(3), every=every)


def test_rows_of_another_database_are_refused(
    carried: Carried, make_database: Callable[..., str]
) -> None:
    """No transaction holds their writes and the cursor."""
    other = make_database("sqlite")
    carried.body = loop(fill(other, [1]))
    state, error = carried.mailbox.deliver(carried.send())
    assert (state, type(error)) == ("FAILURE", ConfigurationError)
    assert f"using='{other}'" in str(error)
    assert written(other) == {1: 0}


def test_without_a_row_there_is_no_place(carried: Carried) -> None:
    """A task that is not carried gets an error that says what it needs."""
    carried.body = loop(range(3), do=lambda item: None)
    with pytest.raises(ConfigurationError, match="until_done"):
        list(resumable(range(3)))


def test_a_direct_call_is_a_plain_loop(carried: Carried) -> None:
    """With a transaction for each chunk, also inside of one."""
    people = fill(carried.alias, range(1, 11))
    carried.body = loop(people, every=3)
    assert carried.task() == "done"
    with transaction.atomic(using=carried.alias):
        assert carried.task.apply().result == "done"
    assert written(carried.alias) == dict.fromkeys(range(1, 11), 2)


# The open chunk.


def leave(how: str, carried: Carried) -> Callable[[Any, Any], Any]:
    """Return what ends a loop in a certain way."""

    def end(task: Any, row: Any) -> Any:
        if how == "retry":
            raise task.retry(countdown=0)
        if how == "finish":
            current_claim().finish()
        if how == "nested":
            transaction.atomic(using=carried.alias).__enter__()
        raise {
            "error": ValueError("no"),
            "limit": SoftTimeLimitExceeded(),
            "ignore": Ignore(),
            "reject": Reject("no", requeue=False),
            "nested": ValueError("no"),
        }[how]

    return end


@pytest.mark.sql
@pytest.mark.parametrize(
    ("how", "state"),
    [
        ("error", "failed"),
        ("limit", "failed"),
        ("reject", "failed"),
        ("finish", "failed"),
        ("nested", "failed"),
        ("ignore", ""),
        ("retry", "sent"),
    ],
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_an_open_chunk_is_rolled_back(
    carried: Carried, how: str, state: str, is_kept: bool
) -> None:
    """Whatever ends the loop, and though a traceback keeps it; the chunks before it stay."""
    people, kept = fill(carried.alias, range(1, 11)), list[Any]()

    def body(task: Any) -> None:
        loop = iter(resumable(people, every=3))
        if is_kept:
            kept.append(loop)
        for row in loop:
            write(row)
            if row.pk == 5:
                leave(how, carried)(task, row)

    carried.body = body
    carried.mailbox.deliver(carried.send())
    assert sum(written(carried.alias).values()) == 3
    assert not connections[carried.alias].in_atomic_block
    assert [row.state for row in carried.rows.all()] == [state] * bool(state)
    with transaction.atomic(using=carried.alias):
        kept.clear()
        gc.collect()
        fill(carried.alias, [100])
    assert 100 in written(carried.alias)


@pytest.mark.sql
@pytest.mark.parametrize("how", ["break", "return"])
def test_leaving_a_loop_rolls_its_chunk_back(carried: Carried, how: str) -> None:
    """The task goes on behind it, in no transaction, and succeeds."""
    people = fill(carried.alias, range(1, 11))

    def walk() -> None:
        rows = resumable(people, every=3)
        for row in rows:
            write(row)
            if row.pk == 5 and how == "return":
                return
            if row.pk == 5:
                break
        fill(carried.alias, [100])

    def body(task: Any) -> None:
        walk()
        fill(carried.alias, [101])

    carried.body = body
    assert carried.mailbox.deliver(carried.send()).state == "SUCCESS"
    rows = written(carried.alias)
    assert sum(rows.values()) == 3
    assert (100 in rows, 101 in rows) == (how == "break", True)


@pytest.mark.sql
def test_a_failed_task_goes_on_when_it_is_retried(carried: Carried) -> None:
    """By itself or by an operator."""
    people = fill(carried.alias, range(1, 11))

    def fail() -> None:
        raise ValueError("no")

    carried.body = loop(people, {5: fail}, every=3)
    assert carried.mailbox.deliver(carried.send()).state == "FAILURE"
    carried.rows.revive()
    (again,) = carried.relay()
    carried.body = lambda task: [write(row) for row in resumable(people, every=3)] and task.retry()
    assert carried.mailbox.deliver(again).state == "RETRY"
    carried.body = loop(people, every=3)
    assert carried.mailbox.deliver(carried.mailbox.take_one()).state == "SUCCESS"
    assert written(carried.alias) == EACH_ONCE


def test_a_replacement_begins_anew(carried: Carried) -> None:
    """The cursor is of other work than that of the task that took its place."""
    people = fill(carried.alias, range(1, 11))
    other, seen = carried.make_task("tests.other"), list[int]()

    def body(task: Any) -> Any:
        for row in resumable(people, every=3):
            write(row)
        raise task.replace(other.si().set(using=carried.alias))

    carried.body = body
    carried.mailbox.deliver(carried.send())
    carried.body = loop(range(3), do=seen.append)
    assert carried.mailbox.deliver(carried.mailbox.take_one()).state == "SUCCESS"
    assert seen == [0, 1, 2]


@pytest.mark.sql
def test_a_nested_block_is_a_savepoint(carried: Carried) -> None:
    """What it rolls back is its own part alone."""
    people = fill(carried.alias, range(1, 6))

    def body(task: Any) -> None:
        for row in resumable(people, every=3):
            write(row)
            with pytest.raises(ValueError, match="no"), transaction.atomic(using=carried.alias):
                write(row)
                raise ValueError("no")

    carried.body = body
    assert carried.mailbox.deliver(carried.send()).state == "SUCCESS"
    assert written(carried.alias) == dict.fromkeys(range(1, 6), 1)


def test_it_needs_to_be_outside_of_a_block(carried: Carried) -> None:
    """A block around the loop would take the commits of its chunks away."""
    people = fill(carried.alias, range(1, 6))

    def body(task: Any) -> None:
        with transaction.atomic(using=carried.alias):
            loop(people)(task)

    carried.body = body
    state, error = carried.mailbox.deliver(carried.send())
    assert (state, type(error)) == ("FAILURE", WrongTransaction)
    assert not any(written(carried.alias).values())


def test_a_block_around_the_next_item_fails_the_task(carried: Carried) -> None:
    """Its end would be behind the commit of the chunk."""
    people = fill(carried.alias, range(1, 6))

    def body(task: Any) -> None:
        rows = iter(resumable(people, every=2))
        write(next(rows))
        write(next(rows))
        with transaction.atomic(using=carried.alias):
            next(rows)

    carried.body = body
    state, error = carried.mailbox.deliver(carried.send())
    assert (state, type(error)) == ("FAILURE", WrongTransaction)
    assert not any(written(carried.alias).values())


def test_an_async_body_is_refused(carried: Carried) -> None:
    """By Django's own error."""
    people = fill(carried.alias, range(1, 6))

    async def walk() -> None:
        for row in resumable(people):
            write(row)

    carried.body = lambda task: asyncio.run(walk())
    state, error = carried.mailbox.deliver(carried.send())
    assert (state, type(error)) == ("FAILURE", SynchronousOnlyOperation)


@pytest.mark.sql
def test_a_lost_claim_rolls_the_chunk_back(carried: Carried) -> None:
    """Its UPDATE finds no row, and so nothing of the chunk is committed."""
    people = fill(carried.alias, range(1, 11))
    carried.body = loop(people, {5: lambda: carried.rows.update(token="another")}, every=3)
    state, error = carried.mailbox.deliver(carried.send())
    assert (state, type(error)) == ("FAILURE", ClaimLost)
    assert sum(written(carried.alias).values()) == 3


@pytest.mark.sql
def test_a_run_that_lost_its_claim_begins_no_loop(carried: Carried) -> None:
    """Another run has done all of it meanwhile."""
    people, message = fill(carried.alias, range(1, 11)), carried.send()

    def body(task: Any) -> Any:
        carried.make_due()
        (again,) = carried.relay()
        carried.body = loop(people, every=3)
        assert carried.deliver_elsewhere(again) == ("SUCCESS", "done")
        return carried.body(task)

    carried.body = body
    assert carried.mailbox.deliver(message).state == "IGNORED"
    assert written(carried.alias) == EACH_ONCE


def test_its_place_is_kept_until_the_task_ends(carried: Carried) -> None:
    """A process that dies behind the loop leaves a task that walks nothing again."""
    people, message = fill(carried.alias, range(1, 11)), carried.send()
    carried.body = loop(people, every=3)
    leave_dead(carried, message, after_body=True)
    (again,) = carried.relay()
    assert carried.mailbox.deliver(again) == ("SUCCESS", "done")
    assert written(carried.alias) == EACH_ONCE


@pytest.mark.parametrize("carried", ["mariadb"], indirect=True)
def test_a_deadlock_that_the_body_hides_fails_the_chunk(carried: Carried) -> None:
    """The server has rolled the first half back, and would commit the second one."""
    people = fill(carried.alias, range(1, 11))

    def roll_back() -> None:
        with connections[carried.alias].cursor() as cursor:
            cursor.execute("ROLLBACK")  # what the server does

    carried.body = loop(people, {5: roll_back}, every=3)
    state, error = carried.mailbox.deliver(carried.send())
    assert (state, "SAVEPOINT" in str(error)) == ("FAILURE", True)
    assert sum(written(carried.alias).values()) == 3
