"""``resumable()`` in carried tasks: what each end of a run leaves of its chunks."""

import asyncio
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from celery import chain
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from django.core.exceptions import SynchronousOnlyOperation
from django.db import IntegrityError, connections, transaction
from django.db.models import QuerySet, Window
from django.db.models.functions import RowNumber
from django.test.utils import CaptureQueriesContext

from django_celery_safe import (
    ClaimLost,
    ConfigurationError,
    WrongTransaction,
    current_claim,
    resumable,
    resumed_at,
    send_on_commit,
)
from tests.app.models import Account, Customer, Person, Ticket, Voucher
from tests.resuming.loops import EACH_ONCE, die_after, fill, loop, run, write, written
from tests.sending.carrying import Carried, leave_dead


@pytest.mark.sql
def test_a_killed_loop_goes_on_behind_its_last_chunk(carried: Carried) -> None:
    """Each row is written to once, however many processes die; one without a chunk counts."""
    people = fill(carried.alias)
    for count, deaths, done in [(2, 0, 0), (1, 1, 0), (7, 0, 6), (1, 1, 6)]:
        die_after(carried, count, people)
        assert (carried.row.deaths, sum(written(carried.alias).values())) == (deaths, done)
    assert run(carried, loop(people)) == ("SUCCESS", "done")
    assert written(carried.alias) == EACH_ONCE
    assert not carried.rows.exists()


ROWS: dict[str, Callable[[Any, int], Any]] = {
    "a UUID": lambda alias, n: Ticket.objects.using(alias).create(),
    "a text": lambda alias, n: Voucher.objects.using(alias).create(code=f"é {n}"),
    "another row": lambda alias, n: Customer.objects.using(alias).create(),
}


@pytest.mark.sql
@pytest.mark.parametrize("kind", ROWS)
def test_any_unique_key_can_be_walked(carried: Carried, kind: str) -> None:
    """A key may be a text, a UUID or another row."""
    model = {type(ROWS[kind](carried.alias, n)) for n in range(7)}.pop()
    rows, seen = model.objects.using(carried.alias), list[Any]()
    die_after(carried, 4, rows.all(), do=lambda row: seen.append(row.pk))
    run(carried, loop(rows.all(), do=lambda row: seen.append(row.pk)))
    assert seen[:3] + seen[4:] == list(rows.order_by("pk").values_list("pk", flat=True))


@pytest.mark.sql
def test_rows_may_come_and_go_meanwhile(carried: Carried) -> None:
    """Deleted rows shift nothing, new rows behind the place are walked, and filters hold."""
    people = fill(carried.alias).filter(pk__lt=100)
    die_after(carried, 5, people, every=2)
    people.filter(pk__in=[1, 3, 5, 6]).delete()
    fill(carried.alias, [-1, 11, 100])
    run(carried, loop(people))
    assert written(carried.alias) == {-1: 0, 2: 1, 4: 1, 7: 1, 8: 1, 9: 1, 10: 1, 11: 1, 100: 0}


@pytest.mark.sql
def test_a_row_that_a_join_returns_twice_is_walked_once(carried: Carried) -> None:
    """Also if its two places are in two chunks."""
    keys = [Account.objects.using(carried.alias).create().pk for _ in range(3)]
    for number in range(2):
        ROWS["a text"](carried.alias, number)
    seen, twice = list[Any](), Account.objects.using(carried.alias).extra(tables=["app_voucher"])
    run(carried, loop(twice, do=lambda row: seen.append(row.pk)))
    assert seen == keys


@pytest.mark.sql
def test_a_chunk_costs_two_statements(carried: Carried) -> None:
    """One reads its rows, one writes the cursor; the first also counts the rows."""
    people, message = fill(carried.alias), carried.send()
    with CaptureQueriesContext(connections[carried.alias]) as queries:
        run(carried, loop(people, do=lambda row: None), message)
    reads = [one["sql"] for one in queries if "app_person" in one["sql"]]
    ours = [one["sql"] for one in queries if "checkpoint_at = " in one["sql"]]
    assert (len(reads), len(ours)) == (1 + 4, 4)


class Inexact(QuerySet[Any]):
    """Rows of a database that compares keys less exactly than Python."""

    def filter(self, *args: Any, **kwargs: Any) -> Any:
        """Leave out nothing."""
        return self


def test_a_row_that_comes_again_is_an_error(carried: Carried) -> None:
    """Otherwise the loop would have no end."""
    fill(carried.alias, [1])
    state, error = run(carried, loop(Inexact(Person).using(carried.alias), every=1))
    is_said = "finds 1 behind itself" in str(error)
    assert (state, written(carried.alias), is_said) == ("FAILURE", {1: 1}, True)


@pytest.mark.parametrize("items", [range(7), [*range(7)]])
def test_a_sequence_is_walked_by_its_index(carried: Carried, items: Any) -> None:
    """The same as with rows; what is not in the database is repeated for one chunk."""
    seen = list[int]()
    die_after(carried, 5, items, do=seen.append)
    assert run(carried, loop(items, do=seen.append)) == ("SUCCESS", "done")
    assert seen == [0, 1, 2, 3, 4, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (range(10), range(4), "the list has 4 items now, of 10"),
        (range(10), Person, "the code walks app.person by id"),
        (Person, Ticket, "the code walks app.ticket by id"),
        (Person, range(10), "the code walks a list"),
        (Person, None, "the code walks checkpoint()"),
        ("int to UUID", Ticket, "the key is now a UUIDField"),
    ],
)
def test_a_cursor_that_does_not_fit_is_an_error(
    carried: Carried, before: Any, after: Any, said: str
) -> None:
    """The task fails, and nothing is done: never a silent start."""
    people, seen = fill(carried.alias), list[Any]()
    ROWS["a UUID"](carried.alias, 0)
    rows = {
        Person: people,
        Ticket: Ticket.objects.using(carried.alias).all(),
        "int to UUID": people,
    }
    die_after(carried, 5, rows.get(before, before), do=lambda item: None)
    if before == "int to UUID":
        carried.rows.update(cursor=carried.row.cursor.replace("person", "ticket"))
    body = loop(rows.get(after, after), do=seen.append) if after else lambda task: resumed_at()
    state, error = run(carried, body)
    assert (state, type(error), seen) == ("FAILURE", ConfigurationError, [])
    assert said in str(error)
    assert carried.row.state == "failed"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: resumable(rows.order_by("email")), "order_by"),
        (lambda rows: resumable(rows.reverse()), "order_by"),
        (lambda rows: resumable(rows.distinct()), "distinct"),
        (lambda rows: resumable(rows.all()[:5]), "slice"),
        (lambda rows: resumable(rows.union(rows)), "union"),
        (lambda rows: resumable(rows.values("pk")), "values"),
        (lambda rows: resumable(rows.annotate(n=Window(RowNumber()))), "window"),
        (lambda rows: resumable(rows.iterator()), "generator"),
        (lambda rows: resumable("text"), "str"),
        (lambda rows: resumable({1, 2}), "set"),
        (lambda rows: resumable(rows, key="email"), "email"),
        (lambda rows: resumable(rows, key="invited_at"), "invited_at"),
        (lambda rows: resumable(rows, every=0), "every=0"),
        (lambda rows: resumable(rows, every=True), "every=True"),
        (lambda rows: list(resumable(rows)), "until_done"),
    ],
)
def test_what_has_no_places_is_refused(change: Callable[[Any], Any], said: str) -> None:
    """With what to do instead; also outside of work that has a row."""
    with pytest.raises(ConfigurationError, match=said):
        change(Person.everyone.all())


def test_rows_of_another_database_are_refused(
    carried: Carried, make_database: Callable[..., str]
) -> None:
    """No transaction holds their writes and the cursor."""
    other = make_database("sqlite")
    state, error = run(carried, loop(fill(other, [1])))
    assert (state, type(error), written(other)) == ("FAILURE", ConfigurationError, {1: 0})
    assert f"using='{other}'" in str(error)


def test_a_direct_call_is_a_plain_loop(carried: Carried) -> None:
    """With a transaction for each chunk, also inside of one."""
    carried.body = loop(fill(carried.alias))
    assert carried.task() == "done"
    with transaction.atomic(using=carried.alias):
        assert carried.task.apply().result == "done"
    assert written(carried.alias) == dict.fromkeys(EACH_ONCE, 2)


# The open chunk.


def leave(task: Any, how: Any) -> None:
    """End a loop in a certain way."""
    if how == "nested":
        transaction.atomic(using=task.request.args[0]).__enter__()
        how = ValueError("no")
    if how == "finish":
        current_claim().finish()
    raise task.retry(countdown=0) if how == "retry" else how


@pytest.mark.sql
@pytest.mark.parametrize(
    ("how", "state"),
    [
        (ValueError("no"), "failed"),
        (SoftTimeLimitExceeded(), "failed"),
        (Reject("no", requeue=False), "failed"),
        (Ignore(), None),
        ("finish", "failed"),
        ("nested", "failed"),
        ("retry", "sent"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_an_open_chunk_is_rolled_back(
    carried: Carried, how: Any, state: str | None, is_kept: bool
) -> None:
    """Whatever ends the loop, and though something keeps it; the chunks before it stay."""
    people, kept = fill(carried.alias), list[Any]()

    def body(task: Any, alias: str) -> None:
        loop = iter(resumable(people, every=3))
        kept.extend([loop] * is_kept)
        for row in loop:
            write(row)
            if row.pk == 5:
                leave(task, how)

    run(carried, body, carried.send(carried.alias))
    assert sum(written(carried.alias).values()) == 3
    assert not connections[carried.alias].in_atomic_block
    assert [row.state for row in carried.rows.all()] == [state] * (state is not None)
    with transaction.atomic(using=carried.alias):
        kept.clear()
        gc.collect()
        fill(carried.alias, [100])
    assert 100 in written(carried.alias)


@pytest.mark.sql
@pytest.mark.parametrize("how", ["break", "return"])
def test_leaving_a_loop_rolls_its_chunk_back(carried: Carried, how: str) -> None:
    """The task goes on behind it, in no transaction, and succeeds."""
    people = fill(carried.alias)

    def walk() -> None:
        rows = resumable(people, every=3)
        for row in rows:
            write(row)
            if row.pk == 5 and how == "return":
                return
            if row.pk == 5:
                break
        fill(carried.alias, [100])

    assert run(carried, lambda task: walk() or str(fill(carried.alias, [101]))).state == "SUCCESS"
    rows = written(carried.alias)
    assert (sum(rows.values()), 100 in rows, 101 in rows) == (3, how == "break", True)


@pytest.mark.sql
def test_a_failed_task_goes_on_when_it_is_retried(carried: Carried) -> None:
    """By an operator or by itself."""
    people, none = fill(carried.alias), {5: lambda: [][0]}
    assert run(carried, loop(people, none)).state == "FAILURE"
    carried.rows.revive()
    retry = loop(people.filter(pk__lt=9))
    assert run(carried, lambda task: retry() and task.retry()).state == "RETRY"
    assert run(carried, loop(people), carried.mailbox.take_one()).state == "SUCCESS"
    assert written(carried.alias) == EACH_ONCE


@pytest.mark.sql
@pytest.mark.parametrize("is_same", [True, False])
def test_a_retry_with_other_arguments_is_other_work(carried: Carried, is_same: bool) -> None:
    """Its place in one feed is none in another; the rest of a chain does not count."""
    walk, args = loop(fill(carried.alias)), [1, {"b": [2.5, None], "a": "é"}]
    other = carried.make_task("tests.other").si().set(using=carried.alias)
    parts = chain(carried.task.s(*args).set(using=carried.alias, link=other), other, other)
    send_on_commit(parts, using=carried.alias)
    again = {} if is_same else {"args": [2]}
    body = lambda task, *args: walk() and task.retry(countdown=0, **again)  # noqa: E731
    assert run(carried, body, carried.mailbox.take_one()).state == "RETRY"
    state, value = run(carried, lambda task, *args: walk(), carried.mailbox.take_one())
    assert state == ("SUCCESS" if is_same else "FAILURE")
    assert ("other arguments" in str(value)) is not is_same


def test_a_replacement_begins_anew(carried: Carried) -> None:
    """The cursor is of other work than that of the task that took its place."""
    other, seen = carried.make_task("tests.other").si().set(using=carried.alias), list[int]()
    walk = loop(fill(carried.alias))
    run(carried, lambda task: walk() and task.replace(other))
    run(carried, loop(range(3), do=seen.append), carried.mailbox.take_one())
    assert seen == [0, 1, 2]


@pytest.mark.parametrize("carried", ["postgres"], indirect=True)
@pytest.mark.parametrize("where", ["process", "thread"])
def test_a_loop_that_ends_elsewhere_leaves_the_chunk_alone(carried: Carried, where: str) -> None:
    """A garbage collector may end it in a forked child, or in another thread."""
    people = fill(carried.alias)

    def body(task: Any) -> None:
        rows = iter(resumable(people, every=3))
        for row in rows:
            write(row)
            if row.pk == 2 and where == "process":
                if not (child := os.fork()):
                    rows.close()  # type: ignore[attr-defined]
                    os._exit(0)
                os.waitpid(child, 0)
            elif row.pk == 2:
                # As the garbage collector would, in another thread; here the generator is running.
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(current_claim().abandon_chunk or bool).result()

    assert run(carried, body).state == "SUCCESS"
    assert written(carried.alias) == EACH_ONCE


def test_a_task_that_is_called_directly_leaves_its_caller_s_place_alone(carried: Carried) -> None:
    """Its loop is none of the carried run."""
    inner, seen = carried.make_task("tests.inner"), list[str]()

    def body(task: Any) -> None:
        if task.name == inner.name:
            loop(range(5), do=bool)()
        else:
            inner()
            seen.append(carried.row.cursor)

    assert run(carried, body).state == "SUCCESS"
    assert seen == [""]


@pytest.mark.sql
def test_a_nested_block_is_a_savepoint(carried: Carried) -> None:
    """Its rollback leaves the rest of the chunk alone."""

    def write_twice(row: Any) -> None:
        write(row)
        with pytest.raises(ValueError, match="no"), transaction.atomic(using=carried.alias):
            write(row)
            raise ValueError("no")

    assert run(carried, loop(fill(carried.alias), do=write_twice)).state == "SUCCESS"
    assert written(carried.alias) == EACH_ONCE


def walk_twice(people: Any) -> None:
    """Begin a second loop."""
    for _ in range(2):
        loop(people)()


def walk_inside(people: Any) -> None:
    """Walk inside of a block."""
    with transaction.atomic(using=people.db):
        loop(people)()


def step_inside(people: Any) -> None:
    """Go to the next chunk inside of a block."""
    rows = iter(resumable(people, every=1))
    write(next(rows))
    with transaction.atomic(using=people.db):
        next(rows)


def walk_asynchronously(people: Any) -> None:
    """Walk in an event loop."""

    async def walk() -> None:
        loop(people)()

    asyncio.run(walk())


@pytest.mark.parametrize(
    ("body", "error", "count"),
    [
        (walk_twice, ConfigurationError, 10),
        (walk_inside, WrongTransaction, 0),
        (step_inside, WrongTransaction, 0),
        (walk_asynchronously, SynchronousOnlyOperation, 0),
    ],
)
def test_a_wrong_place_fails_the_task(carried: Carried, body: Any, error: Any, count: int) -> None:
    """And leaves nothing of the chunk."""
    people = fill(carried.alias)
    state, found = run(carried, lambda task: body(people))
    assert (state, type(found), sum(written(carried.alias).values())) == ("FAILURE", error, count)


@pytest.mark.sql
def test_a_lost_claim_rolls_the_chunk_back(carried: Carried) -> None:
    """Its UPDATE finds no row, and so nothing of the chunk is committed."""
    lose = {5: lambda: carried.rows.update(token="another")}
    state, error = run(carried, loop(fill(carried.alias), lose))
    assert (state, type(error)) == ("FAILURE", ClaimLost)
    assert sum(written(carried.alias).values()) == 3


@pytest.mark.sql
def test_a_run_that_lost_its_claim_begins_no_loop(carried: Carried) -> None:
    """Another run has done all of it meanwhile."""
    walk = loop(fill(carried.alias))

    def body(task: Any) -> Any:
        carried.make_due()
        (again,) = carried.relay()
        carried.body = walk
        assert carried.deliver_elsewhere(again) == ("SUCCESS", "done")
        return walk()

    assert run(carried, body).state == "IGNORED"
    assert written(carried.alias) == EACH_ONCE


def test_its_place_is_kept_until_the_task_ends(carried: Carried) -> None:
    """A process that dies behind the loop leaves a task that walks nothing again."""
    walk = loop(fill(carried.alias))
    leave_dead(carried, carried.send(), after=walk)
    assert run(carried, walk) == ("SUCCESS", "done")
    assert written(carried.alias) == EACH_ONCE


@pytest.mark.parametrize("carried", ["mariadb"], indirect=True)
def test_a_deadlock_that_the_body_hides_fails_the_chunk(carried: Carried) -> None:
    """The server has rolled the first half back, and would commit the second one."""
    execute = connections[carried.alias].cursor().execute
    state, error = run(carried, loop(fill(carried.alias), {5: lambda: execute("ROLLBACK")}))
    assert (state, "SAVEPOINT" in str(error)) == ("FAILURE", True)
    assert sum(written(carried.alias).values()) == 3


@pytest.mark.sql
@pytest.mark.parametrize("broken", ["caught", "set_rollback"])
def test_a_chunk_with_a_broken_transaction_is_not_committed(broken: str, carried: Carried) -> None:
    """Its cursor would move on, and its writes be gone."""

    def spoil(row: Any) -> None:
        write(row)
        if row.pk == 3 and broken == "set_rollback":
            transaction.set_rollback(True, using=carried.alias)
        elif row.pk == 3:
            with suppress(IntegrityError):
                Person.everyone.using(carried.alias).create(pk=1)

    assert run(carried, loop(fill(carried.alias), do=spoil)).state == "FAILURE"
    assert set(written(carried.alias).values()) == {0}


def test_what_is_written_in_a_chunk_that_is_kept_open_is_an_error(carried: Carried) -> None:
    """It is rolled back at the end of the task, which must not look like a success."""
    people, kept = fill(carried.alias), []

    def body(task: Any) -> None:
        kept.append(iter(resumable(people, every=3)))
        next(kept[0])
        fill(carried.alias, [100])

    assert type(run(carried, body).value) is WrongTransaction
    assert 100 not in written(carried.alias)
