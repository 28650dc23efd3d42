"""idempotent on one connection: its claims, its stored results and its errors."""

import functools
import inspect
import itertools
import logging
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator
from contextvars import Context
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest
from celery import Celery, Task, shared_task
from celery.exceptions import Ignore, Retry, SoftTimeLimitExceeded
from django.db import transaction
from django.test import TestCase
from pytest_django import Settings

from django_celery_safe import (
    AlreadyClaimed,
    ClaimLost,
    ConfigurationError,
    IdempotencyConflict,
    IdempotencyError,
    ResultNotStored,
    WrongTransaction,
    current_claim,
    idempotent,
    single_instance,
)
from django_celery_safe.databases import Now
from django_celery_safe.idempotency import idempotent_work
from django_celery_safe.leases.claim import Claim
from django_celery_safe.models import IdempotencyRecord
from django_celery_safe.signals import claim_failed, claim_finished, claim_lost, claim_repeated
from tests.conftest import MakeDatabase
from tests.kinds import LATER_MARIADB
from tests.sending.conftest import hearing
from tests.servers.databases import registered, sqlite_settings

records = IdempotencyRecord.objects


def charge(number: int, currency: str = "EUR") -> str:
    """Return what was charged."""
    return f"{number} {currency}"


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[tuple[Any, ...]]]:
    """Return a function that does the same under its name, and what it was called with."""
    calls: list[tuple[Any, ...]] = []

    def work(number: Any, currency: str = "EUR") -> Any:
        calls.append((number, currency))
        return function(number, currency)

    return work, calls


# The context manager.


def test_the_block_is_done_once(db: None) -> None:
    """The first block is asked to do it, every later one gets what the first finished with."""
    with idempotent("invoice:1") as claim:
        assert claim
        assert claim.key == "invoice:1"
        assert claim.result is None
        claim.finish({"charge": "ch_1"})
    assert claim.result == {"charge": "ch_1"}
    for _ in range(2):
        with idempotent("invoice:1") as claim:
            assert not claim
            assert claim.result == {"charge": "ch_1"}
    with idempotent("invoice:2") as claim:
        assert claim


def test_a_block_that_ends_well_is_done(db: None) -> None:
    """Without finish() it is done all the same, with the result None."""
    with idempotent("invoice:1") as claim:
        assert claim
    with idempotent("invoice:1") as claim:
        assert not claim
        assert claim.result is None


@pytest.mark.parametrize("error", [ValueError("no"), Retry("later"), Ignore(), KeyboardInterrupt()])
def test_what_failed_is_done_by_the_next(error: BaseException, db: None) -> None:
    """An error leaves the block, and whoever comes next does the work at once."""
    with pytest.raises(type(error)), idempotent("invoice:1") as claim:
        assert claim
        raise error
    assert records.get().state == IdempotencyRecord.State.FAILED
    with idempotent("invoice:1") as claim:
        assert claim
    record = records.get()
    assert (record.state, record.claims, record.error) == ("done", 2, "")


def test_an_error_after_finish_leaves_it_done(db: None) -> None:
    """Work that was finished outside atomic() is done, even if the block raises after that."""
    with pytest.raises(ValueError, match="no"), idempotent("invoice:1") as claim:
        claim.finish(1)
        raise ValueError("no")
    with idempotent("invoice:1") as claim:
        assert (bool(claim), claim.result) == (False, 1)


def test_while_it_is_done_another_is_told_by_whom(db: None) -> None:
    """AlreadyClaimed names the key, the holder and what is left of its lease."""
    with idempotent("invoice:1", timeout=20) as claim:
        assert claim
        with pytest.raises(AlreadyClaimed) as caught:
            Context().run(enter_block)
    assert caught.value.key == "invoice:1"
    assert caught.value.task_id is None
    assert "process " in caught.value.holder
    assert 0 < caught.value.remaining <= 20


def enter_block() -> None:
    """Ask for what is being done; in an empty Context, as code outside of the block does."""
    with idempotent("invoice:1"):
        pytest.fail("the block ran")


def test_work_that_asks_for_itself_is_told(db: None) -> None:
    """Inside its own block the same key would wait for itself; another key is no matter."""
    with idempotent("invoice:1") as outer:
        assert outer
        with pytest.raises(IdempotencyError, match="would wait for itself") as caught:
            enter_block()
        assert not isinstance(caught.value, AlreadyClaimed)
        with idempotent("invoice:2") as inner:
            assert inner
            with pytest.raises(IdempotencyError, match="would wait for itself"):
                enter_block()
    with idempotent("invoice:1") as repeat:
        assert not repeat


def test_one_object_serves_one_block_at_a_time(db: None) -> None:
    """An object that is in use is refused, and can be used again when its block has ended."""
    once = idempotent("invoice:1")
    with once as claim:
        assert claim
        with pytest.raises(IdempotencyError, match="in use by this very object"), once:
            pytest.fail("the block ran")
    with once as claim:
        assert not claim


@pytest.mark.parametrize("key", ["", ["number"], charge, ("number",)])
def test_a_block_needs_a_text_as_its_key(key: Any, db: None) -> None:
    """Only the decorator has arguments, from which a key could be made."""
    with (
        pytest.raises(ConfigurationError, match="needs a string, not empty"),
        idempotent(key=key),
    ):
        pytest.fail("the block ran")
    assert not records.exists()


def test_a_block_needs_a_key(db: None) -> None:
    """Without any key, or with None, nothing would stand for the work."""
    with pytest.raises(ConfigurationError, match="needs a string"), idempotent():
        pytest.fail("the block ran")
    with pytest.raises(ConfigurationError, match="key=None"):
        idempotent(key=None)  # type: ignore[call-overload]
    with pytest.raises(ConfigurationError, match="key=None"):
        idempotent(None)  # type: ignore[call-overload]


def test_a_key_that_was_not_filled_in_is_refused(db: None) -> None:
    """In a block nothing fills the key in, so a forgotten f is found."""
    with (
        pytest.raises(ConfigurationError, match="Write the key as an f-string"),
        idempotent("invoice:{number}"),
    ):
        pytest.fail("the block ran")


def test_long_and_odd_keys_are_apart(db: None) -> None:
    """Keys that a column can't hold as they are don't collide, and are told whole."""
    keys = ["x" * 300, "x" * 301, "with space", "é", "\0", "a\nb", "\ud800", "a" * 255]
    for key in keys:
        with idempotent(key) as claim:
            assert claim, key
            claim.finish(keys.index(key))
    for key in keys:
        with idempotent(key) as claim:
            assert (bool(claim), claim.result) == (False, keys.index(key))
            assert claim.key == key


def test_a_repeat_that_does_not_ask_is_warned_of(db: None) -> None:
    """A block that ran although it was done, and never asked, gets a RuntimeWarning."""
    with idempotent("invoice:1"):
        pass
    with (
        pytest.warns(RuntimeWarning, match="'invoice:1' was already done") as told,
        idempotent("invoice:1"),
    ):
        pass
    assert [warning.filename for warning in told] == [__file__]


def test_an_error_in_a_repeat_comes_through(db: None) -> None:
    """A repeat changes nothing of what its block raises, nor of what is stored."""
    with idempotent("invoice:1") as claim:
        claim.finish(1)
    with pytest.raises(ValueError, match="no"), idempotent("invoice:1") as claim:
        assert not claim
        raise ValueError("no")
    with idempotent("invoice:1") as claim:
        assert (bool(claim), claim.result) == (False, 1)


# Methods of a claim.


def test_a_claim_is_finished_once(db: None) -> None:
    """A second finish() is an error, and the first stays."""
    with idempotent("invoice:1") as claim:
        claim.finish(1)
        with pytest.raises(IdempotencyError, match="was finished before"):
            claim.finish(2)
        with pytest.raises(IdempotencyError, match="was finished before"):
            claim.ensure()
    with idempotent("invoice:1") as claim:
        assert (bool(claim), claim.result) == (False, 1)


def test_a_repeat_has_nothing_to_finish(db: None) -> None:
    """finish() and ensure() on what is not ours say so, also after the block."""
    with idempotent("invoice:1") as ours:
        ours.ensure()
    with idempotent("invoice:1") as repeat:
        assert not repeat
        for claim in (ours, repeat):
            for use in (claim.finish, claim.ensure):
                with pytest.raises(IdempotencyError, match="is not ours"):
                    use()


@pytest.mark.parametrize("taken", [True, False])
def test_a_lost_claim_does_not_finish(taken: bool, db: None) -> None:
    """With the record another's, or gone, ensure() and finish() raise ClaimLost."""
    with (
        hearing(claim_lost) as losses,
        hearing(claim_finished) as ends,
        pytest.raises(ClaimLost) as caught,
        idempotent("invoice:1") as claim,
    ):
        if taken:
            records.update(token="another's")
        else:
            records.all().delete()
        with pytest.raises(ClaimLost):
            claim.ensure()
        claim.finish(1)
    assert ends == []
    assert [loss["key"] for loss in losses] == ["invoice:1"]
    assert str(caught.value).count("claimed it since" if taken else "its record is gone") == 1
    if taken:
        assert records.get().state == IdempotencyRecord.State.RUNNING


def test_an_error_of_a_lost_claim_changes_nothing(db: None) -> None:
    """A process that lost its claim can't record its failure over another's claim."""
    with (
        hearing(claim_lost) as losses,
        hearing(claim_failed) as failures,
        pytest.raises(ValueError, match="no"),
        idempotent("invoice:1") as claim,
    ):
        assert claim
        records.update(token="another's")
        raise ValueError("no")
    assert records.get().state == IdempotencyRecord.State.RUNNING
    assert len(losses) == 1
    assert failures == []


def test_current_claim_is_that_of_the_innermost_block(db: None) -> None:
    """current_claim() is the claim under which the code works; elsewhere there is none."""
    with idempotent("outer") as outer:
        assert outer
        assert current_claim() is outer
        with idempotent("inner") as inner:
            assert inner
            assert current_claim() is inner
        with idempotent("inner") as repeat:
            assert not repeat
            assert current_claim() is outer
        assert current_claim() is outer
    with pytest.raises(IdempotencyError, match="No claim is being worked on"):
        current_claim()


# Results.

RESULTS: Final[list[Any]] = [
    None, False, 0, 1.5, "", "é\0\ud800", [], [1, [2]], {"a": {"b": None}},
    datetime(2026, 11, 21, 12, 0, 1, 5, tzinfo=UTC), date(2026, 11, 21), time(12, 30),
    Decimal("1.10"), uuid.UUID(int=7), b"\x00\xff",
]  # fmt: skip


@pytest.mark.parametrize("result", RESULTS, ids=repr)
def test_a_repeat_gets_the_result(result: Any, db: None) -> None:
    """Each value of kombu's JSON comes back with its type, even None and other false ones."""
    work, calls = counted(lambda number, currency: result)
    once = idempotent(work)
    assert once(1) == result
    repeated = once(1)
    assert (repeated, type(repeated)) == (result, type(result))
    assert len(calls) == 1


LONG: Final = "x" * 65_536
NOT_KEPT: Final = {"no JSON": object(), "too long": LONG}


@pytest.mark.parametrize("result", NOT_KEPT.values(), ids=NOT_KEPT)
def test_work_whose_result_can_not_be_kept_is_done(result: Any, db: None) -> None:
    """The decorator says so, now and at each repeat, and nothing is done again."""
    work, calls = counted(lambda number, currency: result)
    once = idempotent(work)
    with hearing(claim_finished) as ends, hearing(claim_failed) as failures:
        for _ in range(3):
            with pytest.raises(ResultNotStored, match="can't be stored"):
                once(1)
    assert len(calls) == 1
    assert (len(ends), failures) == (1, [])
    record = records.get()
    assert (record.state, record.result) == ("done", "")


@pytest.mark.parametrize("result", NOT_KEPT.values(), ids=NOT_KEPT)
def test_finish_refuses_what_can_not_be_kept(result: Any, db: None) -> None:
    """finish() raises and notes nothing, so it can be called again with less."""
    with idempotent("invoice:1") as claim:
        with pytest.raises(ResultNotStored):
            claim.finish(result)
        assert records.get().state == IdempotencyRecord.State.RUNNING
        claim.finish("less")
    with idempotent("invoice:1") as claim:
        assert (bool(claim), claim.result) == (False, "less")


def test_the_longest_result_is_kept(db: None) -> None:
    """64 KB of JSON are kept, quotes included."""
    with idempotent("invoice:1") as claim:
        claim.finish(LONG[2:])
    with idempotent("invoice:1") as claim:
        assert (bool(claim), claim.result) == (False, LONG[2:])


# The decorator.


@pytest.mark.parametrize(
    "decorate", [idempotent, idempotent(), idempotent(key=["number", "currency"])]
)
def test_a_call_is_done_once_however_it_is_written(decorate: Any, db: None) -> None:
    """Bare or called, the arguments are the key, with defaults and by any spelling."""
    work, calls = counted(charge)
    once = decorate(work)
    spellings: list[Callable[[], Any]] = [
        lambda: once(1),
        lambda: once(1, "EUR"),
        lambda: once(1, currency="EUR"),
        lambda: once(number=1, currency="EUR"),
        lambda: once(currency="EUR", number=1),
    ]
    assert [call() for call in spellings] == ["1 EUR"] * len(spellings)
    assert calls == [(1, "EUR")]
    assert once(1, "USD") == "1 USD"
    for other in ("1", True, 1.0, None):
        once(other)
    assert len(calls) == 6


def test_one_decorator_serves_many_functions(db: None) -> None:
    """A configured decorator keeps nothing of a function: each has its own keys."""
    decorate = idempotent(key="{number}")

    def first(number: int) -> str:
        return "first"

    def second(number: int) -> str:
        return "second"

    first, second = decorate(first), decorate(second)
    assert [first(1), second(1), first(1), second(1)] == ["first", "second"] * 2
    assert records.count() == 2


def by_number(number: int, currency: str = "EUR") -> str:
    """Return a key."""
    return f"n{number}"


@pytest.mark.parametrize(
    ("key", "text"), [("{number}", "1"), (by_number, "n1"), ("all of {number:03}", "all of 001")]
)
def test_the_key_stands_after_the_name(key: Any, text: str, db: None) -> None:
    """A format string, or a function's text, is the key, after the function's dotted name."""
    once = idempotent(key=key)(charge)
    assert once(1) == "1 EUR"
    assert once(1) == "1 EUR"
    name = f"{__name__}.charge:{text}"
    with hearing(claim_repeated) as repeats:
        once(1)
    assert repeats[0]["key"] == name


def test_the_key_may_come_first(db: None) -> None:
    """A format string, or a list of names, may be given without its name."""
    for key in ("{number}", ["number"], ("number",)):
        work, calls = counted(charge)
        once = idempotent(key)(work)
        assert [once(1), once(1)] == ["1 EUR", "1 EUR"]
        assert len(calls) == 1
        records.all().delete()


@pytest.mark.parametrize("key", ["{number}", ["number"], by_number])
def test_the_same_key_with_other_arguments_is_a_conflict(key: Any, db: None) -> None:
    """Nothing is done, and no argument is stored in clear."""
    work, calls = counted(charge)
    once = idempotent(key=key)(work)
    once(1, "SECRET")
    with pytest.raises(IdempotencyConflict, match="used with other arguments") as caught:
        once(1, "USD")
    assert "process " in caught.value.before
    assert once(1, currency="SECRET") == "1 SECRET"
    assert len(calls) == 1
    kept = records.values().get()
    del kept["result"]
    assert "SECRET" not in str(kept)


def test_a_conflict_is_none_once_the_work_failed(db: None) -> None:
    """A key whose work failed, or expired, stands for nothing: other arguments may have it."""

    @idempotent(key="{number}")
    def once(number: int, divisor: int) -> float:
        return number / divisor

    with pytest.raises(ZeroDivisionError):
        once(1, 0)
    assert once(1, 2) == 0.5
    with pytest.raises(IdempotencyConflict):
        once(1, 4)


def test_a_conflict_is_told_while_the_first_runs(db: None) -> None:
    """Other arguments under a key that is being done are a conflict, no reason to come back."""

    def nested(number: int, currency: str) -> str:
        if currency == "EUR":
            with pytest.raises(IdempotencyConflict):
                Context().run(once, number, "USD")
            with pytest.raises(AlreadyClaimed):
                Context().run(once, number, "EUR")
        return currency

    once = idempotent(key="{number}")(nested)
    assert once(1, "EUR") == "EUR"


def test_a_decorated_function_finds_its_claim(db: None) -> None:
    """current_claim().finish() decides what a repeat gets; the first call returns its own."""

    @idempotent
    def work(number: int) -> str:
        current_claim().finish("stored")
        return "returned"

    assert [work(1), work(1)] == ["returned", "stored"]


def test_methods_are_done_once(db: None) -> None:
    """On a method a key says which arguments count, since its object can't be written down."""

    class Shop:
        calls: list[int] = []

        @idempotent(key="{number}")
        def order(self, number: int) -> int:
            self.calls.append(number)
            return number

    assert [Shop().order(1), Shop().order(1), Shop().order(number=2)] == [1, 1, 2]
    assert Shop.calls == [1, 2]


class Shop:
    """Has a method of the same name as another class of this module."""

    @idempotent(key="{order}")
    def ship(self, order: int) -> str:
        """Return who did it."""
        return "shop"


class Warehouse:
    """The other class."""

    @idempotent(key="{order}")
    def ship(self, order: int) -> str:
        """Return who did it."""
        return "warehouse"


def test_methods_of_two_classes_are_two_things(db: None) -> None:
    """Equal method names in one module don't make one class's work count as the other's."""
    for _ in range(2):
        assert (Shop().ship(7), Warehouse().ship(7)) == ("shop", "warehouse")
    assert sorted(record.key for record in records.all()) == [
        f"{__name__}.Shop.ship:7",
        f"{__name__}.Warehouse.ship:7",
    ]


class Parcel(Task):
    """A task whose other methods are done once, too."""

    name = "tests.idempotent.parcel"

    @idempotent(key="{order}")
    def run(self, order: int) -> list[str]:
        """Return what was done, by each method and by a function that gets the task."""
        return [self.pack(order), self.send(order), note(self, order)]

    @idempotent(key="{order}")
    def pack(self, order: int) -> str:
        """Return what was done."""
        return "packed"

    @idempotent(key="{order}")
    def send(self, order: int) -> str:
        """Return what was done."""
        return "sent"


class Letter(Parcel):
    """Another task, which runs what it inherited."""

    name = "tests.idempotent.letter"

    def run(self, order: int) -> list[str]:
        """Do what its parent does."""
        return ["a letter", *super().run(order)]


@idempotent(key="{order}")
def note(task: "Task[Any, Any]", order: int) -> str:
    """Return what was done."""
    return "noted"


def test_what_gets_a_task_is_not_that_task(db: None) -> None:
    """Methods of a task, and functions that get it, have records of their own, not the task's."""
    app = Celery("parcels", set_as_current=False)
    for task in map(app.register_task, (Parcel(), Letter())):
        assert task(7)[-3:] == ["packed", "sent", "noted"]
    assert {record.key for record in records.all()} == {
        "tests.idempotent.letter:7",
        "tests.idempotent.parcel:7",
        f"{__name__}.Parcel.pack:7",
        f"{__name__}.Parcel.send:7",
        f"{__name__}.note:7",
    }


def _(order: int) -> str:
    return "nameless"


NAMELESS: Final = {
    "lambda": lambda order: "nameless",
    "underscore": _,
    "partial": functools.partial(charge, currency="USD"),
}


@pytest.mark.parametrize("decorator", [idempotent, single_instance])
@pytest.mark.parametrize("function", NAMELESS.values(), ids=NAMELESS)
def test_what_has_no_name_of_its_own_is_refused(
    function: Callable[..., Any], decorator: Any, db: None
) -> None:
    """A lambda would share its record, or its lock, with all others of its module."""
    (argument, *_) = inspect.signature(function).parameters
    decorated = decorator(key=[argument])(function)
    with pytest.raises(ConfigurationError, match="no name of its own"):
        decorated(7)
    assert not records.exists()


def test_the_signature_stays(db: None) -> None:
    """Name, docstring and signature are those of the function."""
    once = idempotent(charge)
    assert (once.__name__, once.__doc__) == ("charge", charge.__doc__)
    with pytest.raises(TypeError):
        once()  # type: ignore[call-arg]
    assert not records.exists()


@shared_task(name="tests.idempotent.refused")
def refused(number: int) -> None:
    """Stand for a task."""


async def later(number: int) -> None:
    """Return before it is done."""


def many(number: int) -> Iterator[int]:
    """Return before it is done, too."""
    yield number


@pytest.mark.parametrize("decorate", [idempotent, idempotent(), idempotent(key="{number}")])
def test_what_can_not_be_decorated_is_refused(decorate: Any) -> None:
    """Above @shared_task it says so; coroutines, generators and classes are refused too."""
    with pytest.raises(TypeError, match="stands above the decorator that makes the task"):
        decorate(refused)
    for function in (later, many):
        with pytest.raises(ConfigurationError, match="would count as done"):
            decorate(function)
    with pytest.raises(TypeError):
        decorate(type("Some", (), {}))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"key": "{nubmer}"}, "nubmer"),
        ({"key": ["nubmer"]}, "nubmer"),
        ({"key": 7}, "key=7"),
        ({"timeout": 0}, "timeout=0"),
        ({"timeout": None}, "timeout=None"),
        ({"ttl": 0}, "ttl=0"),
        ({"ttl": -1}, "ttl=-1"),
        ({"ttl": "7 days"}, "ttl='7 days'"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], sentence: str) -> None:
    """An option that means nothing is an error where it is written."""
    with pytest.raises(ConfigurationError, match=sentence):
        idempotent(**options)(charge)


def test_two_keys_are_refused() -> None:
    """One of two keys would be ignored."""
    with pytest.raises(ConfigurationError, match=r"got two keys, '\{number\}' and 'b'"):
        idempotent("{number}", key="b")  # type: ignore[call-overload]


# Time.


@pytest.mark.parametrize("ttl", [2, timedelta(seconds=2)])
def test_what_is_over_is_done_again(ttl: Any, db: None) -> None:
    """When ttl is over the work is done again, and its new result counts."""
    for result in (1, 2):
        with idempotent("invoice:1", ttl=ttl) as claim:
            assert claim
            claim.finish(result)
        with idempotent("invoice:1", ttl=ttl) as claim:
            assert (bool(claim), claim.result) == (False, result)
        assert records.get().claims == result
        _let_time_pass(timedelta(seconds=3))


def test_what_is_done_for_ever_never_ends(db: None) -> None:
    """With ttl=None a record counts for ever."""
    with idempotent("invoice:1", ttl=None) as claim:
        claim.finish(1)
    assert records.get().expires_at is None
    _let_time_pass(timedelta(days=40_000))
    with idempotent("invoice:1", ttl=None) as claim:
        assert (bool(claim), claim.result) == (False, 1)


def test_the_settings_say_how_long_it_counts(db: None, settings: Settings) -> None:
    """Unset, ttl is IDEMPOTENCY_RETENTION and the lease LOCK_TIMEOUT, as they are at the call."""
    once = idempotent("invoice:1")
    settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": 100, "LOCK_TIMEOUT": 50}
    with once as claim:
        assert claim
        record = records.annotate(now=Now()).get()
        assert 40 < (record.ends_at - record.now).total_seconds() <= 50
    record = records.annotate(now=Now()).get()
    assert record.expires_at is not None
    assert 90 < (record.expires_at - record.now).total_seconds() <= 100


def _let_time_pass(age: timedelta) -> None:
    """Set the moments of all records back: their clock is the database's."""
    for record in records.all():
        for name in ("ends_at", "claimed_at", "ended_at", "expires_at"):
            if moment := getattr(record, name):
                setattr(record, name, moment - age)
        record.save()


# Events.


def test_a_lost_claim_is_logged_as_an_error(db: None, caplog: pytest.LogCaptureFixture) -> None:
    """A claim that was lost is logged at ERROR, once."""
    with pytest.raises(ClaimLost), idempotent("invoice:1") as claim:
        records.all().delete()
        assert claim
    levels = [
        record.levelno
        for record in caplog.records
        if record.name == "django_celery_safe.claim_lost"
    ]
    assert levels == [logging.ERROR]


def test_errors_survive_pickling() -> None:
    """Celery sends errors between processes; their sentences and values arrive."""
    errors: list[IdempotencyError] = [
        AlreadyClaimed("key", "somebody", "id", 1.5),
        ClaimLost("key", "somebody"),
        ClaimLost("key"),
        IdempotencyConflict("key", "somebody"),
        ResultNotStored("key", "it is too long"),
    ]
    for error in errors:
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert (str(copy), vars(copy), copy.args) == (str(error), vars(error), error.args)
        assert "'key'" in str(copy)


# Transactions.


class InPlainTestCase(TestCase):
    """Django's TestCase wraps each test in atomic(); that does not count."""

    def test_it_works(self) -> None:
        """Neither the claim nor its end needs a TransactionTestCase."""
        with idempotent("invoice:1") as claim, transaction.atomic():
            claim.finish(1)
        with idempotent("invoice:1") as claim:
            assert (bool(claim), claim.result) == (False, 1)

    def test_inside_atomic_it_is_refused(self) -> None:
        """An atomic() of the code under test does count."""
        with transaction.atomic(), pytest.raises(WrongTransaction), idempotent("invoice:1"):
            pytest.fail("the block ran")


# Where the work is done, and what it gave is no result.


class Odd:
    """Something that raises when JSON asks for its form, by what no database can keep."""

    def __json__(self) -> None:
        raise AttributeError("no form\0 for \ud800")


@pytest.mark.parametrize("kind", ["sqlite", "postgres", LATER_MARIADB])
@pytest.mark.parametrize(
    "result", [Odd(), {"__type__": "invoice", "__value__": 5}], ids=["raises", "can't be read back"]
)
def test_a_result_that_json_fails_at_is_not_done_again(
    result: Any, kind: Any, make_database: MakeDatabase
) -> None:
    """The work is done even if its result can't be stored, and each call raises."""
    work, calls = counted(lambda number, currency: result)
    once = idempotent(key="{number}", using=make_database(kind))(work)
    for _ in range(2):
        with pytest.raises(ResultNotStored, match="JSON can't take it"):
            once(1)
    assert len(calls) == 1


class Endless:
    """Something at which the time limit hits when JSON asks for its form."""

    def __json__(self) -> None:
        raise SoftTimeLimitExceeded


@pytest.mark.parametrize("way", ["returned", "finish"])
def test_a_time_limit_while_the_result_is_written_down_stays_one(way: str, db: None) -> None:
    """It leaves the work as it is, which is not done, and is done by the next who comes."""
    calls: list[str] = []

    @idempotent("{number}")
    def work(number: int, result: Any) -> Any:
        calls.append(way)
        if way == "finish":
            current_claim().finish(result)
        return result

    with hearing(claim_failed) as failures, pytest.raises(SoftTimeLimitExceeded):
        work(1, Endless())
    assert len(failures) == 1
    assert records.get().state == IdempotencyRecord.State.FAILED
    assert work(1, "short") == "short"
    assert len(calls) == 2


def test_an_interruption_before_the_block_leaves_no_claim_behind(db: None) -> None:
    """At whatever line a time limit hits, the code that runs then works under no claim."""
    entered = (idempotent_work._recording, Claim.holding, Claim.current)
    codes = {inspect.unwrap(function).__code__ for function in entered}
    before = sys.gettrace()
    for number in itertools.count(1):
        left = number

        def trace_line(frame: Any, event: str, arg: Any) -> Any:
            nonlocal left
            left -= event == "line"
            if left == 0:
                raise SoftTimeLimitExceeded
            return trace_line

        def trace(frame: Any, event: str, arg: Any, here: Any = trace_line) -> Any:
            return here if frame.f_code in codes else None

        sys.settrace(trace)
        try:
            with idempotent(f"invoice:{number}"):
                left = 0
                sys.settrace(before)
                break
        except SoftTimeLimitExceeded:
            pass
        finally:
            sys.settrace(before)
        with pytest.raises(IdempotencyError, match="No claim is being worked on"):
            current_claim()
    assert number > 8


def test_a_methods_other_arguments_are_noticed(db: None) -> None:
    """The object of a method tells no two calls apart, its other arguments do."""

    class Shop:
        @idempotent(key="{number}")
        def order(self, number: int, currency: str = "EUR") -> str:
            return currency

    assert Shop().order(1) == Shop().order(1, "EUR") == "EUR"
    with pytest.raises(IdempotencyConflict):
        Shop().order(1, "USD")


# Mistakes that are refused at once.


@pytest.mark.parametrize("field", ["{pk}", "{user.pk}", "{user[pk]}", "{n:03}", "{n!r}", "{ünit}"])
def test_a_forgotten_f_string_is_refused(field: str, db: None) -> None:
    """A field in the key of a block would be the same for all."""
    with (
        pytest.raises(ConfigurationError, match="Write the key as an f-string"),
        idempotent(f"a:{field}"),
    ):
        pytest.fail("the block ran")


@pytest.mark.parametrize("key", ['{"pk": 1}', "{}", "{0}", "a{", "b}"])
def test_braces_that_name_nothing_may_stand_in_a_key(key: str, db: None) -> None:
    """They are text."""
    with idempotent(key) as claim:
        assert claim
        assert claim.key == key


def test_an_async_generator_is_refused() -> None:
    """It returns before its body runs, as every function does that is no plain one."""

    async def numbers(n: int) -> Any:
        yield n

    for decorator in (idempotent, single_instance):
        with pytest.raises(ConfigurationError, match="returns before its body runs"):
            decorator(numbers)


def test_it_stands_below_single_instance() -> None:
    """Above it, a run that is skipped would count as done."""
    with pytest.raises(TypeError, match="Put it below"):
        idempotent("{number}")(single_instance(key="{currency}")(charge))
    both = single_instance(key="{currency}")(idempotent("{number}")(charge))
    assert callable(both)


@pytest.mark.parametrize("ask", ["a block", "a call"])
def test_without_its_table_it_says_what_to_run(
    ask: str, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """A forgotten migration is an error that names the database and the command."""
    assert make_database  # the databases may be asked
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        what = "has no table for that. Run: manage.py migrate django_celery_safe --database=empty"
        with pytest.raises(ConfigurationError, match=what):
            if ask == "a call":
                idempotent(using="empty")(charge)(1)
            with idempotent("a", using="empty"):
                pytest.fail("it was done")
