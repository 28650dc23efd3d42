"""idempotent on one connection: its claims, its stored results and its errors."""

import functools
import inspect
import uuid
from collections.abc import Callable
from contextvars import Context
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import pytest
from celery import shared_task
from celery.exceptions import Retry, SoftTimeLimitExceeded
from django.db import transaction
from django.db.models import F
from django.test import TestCase
from pytest_django import Settings

from django_celery_safe import (
    AlreadyClaimed,
    ConfigurationError,
    IdempotencyConflict,
    InvalidResult,
    WrongTransaction,
    idempotent,
    single_instance,
)
from django_celery_safe.databases import Now
from django_celery_safe.events import CLAIM_FAILED, CLAIM_REPEATED
from django_celery_safe.models import IdempotencyRecord
from tests.conftest import MakeDatabase
from tests.idempotency.test_claims import do, enter, result_of_repeat
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
        assert result_of_repeat() == {"charge": "ch_1"}
    assert do("invoice:2")


@pytest.mark.parametrize(
    ("error", "is_told"), [(Retry("later"), False), (KeyboardInterrupt(), True)]
)
def test_what_failed_is_done_by_the_next(error: BaseException, is_told: bool, db: None) -> None:
    """An error leaves the block, and whoever comes next does the work; a retry is no warning."""
    failing = pytest.raises(type(error))
    with hearing(CLAIM_FAILED) as told, failing, idempotent("invoice:1") as claim:
        assert claim
        raise error
    assert records.get().state == IdempotencyRecord.State.FAILED
    assert len(told) == is_told
    assert do()
    record = records.get()
    assert (record.state, record.claims, record.error) == ("done", 2, "")


def test_an_error_after_finish_leaves_it_done(db: None) -> None:
    """Work that was finished outside atomic() is done, even if the block raises after that."""
    with pytest.raises(ValueError, match="no"), idempotent("invoice:1") as claim:
        claim.finish(1)
        raise ValueError("no")
    assert result_of_repeat() == 1


def test_while_it_is_done_another_is_told_by_whom(db: None) -> None:
    """AlreadyClaimed names the key, the holder and what is left of its lease."""
    with idempotent("invoice:1", timeout=20) as claim:
        assert claim
        with pytest.raises(AlreadyClaimed) as caught:
            # In an empty context, as code outside of the block does.
            Context().run(enter)
    assert caught.value.key == "invoice:1"
    assert caught.value.task_id is None
    assert "process " in caught.value.holder
    assert 0 < caught.value.remaining <= 20


def test_work_that_asks_for_itself_is_told(db: None) -> None:
    """Inside its own block the same key would wait for itself; another key is no matter."""
    with idempotent("invoice:1") as outer:
        assert outer
        with pytest.raises(ConfigurationError, match="would wait for itself") as caught:
            enter()
        assert not isinstance(caught.value, AlreadyClaimed)
        with idempotent("invoice:2") as inner:
            assert inner
            with pytest.raises(ConfigurationError, match="would wait for itself"):
                enter()
    assert not do()


def test_a_block_needs_a_text_as_its_key(db: None) -> None:
    """Only the decorator has arguments, from which a key could be made."""
    keys: list[Any] = ["", ["number"], charge]
    for key in keys:
        with pytest.raises(ConfigurationError, match="needs a string, not empty"):
            enter(key)
    with pytest.raises(ConfigurationError, match="key=None"):
        idempotent(None)  # type: ignore[call-overload]
    assert not records.exists()


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


# Methods of a claim.


def test_a_claim_is_finished_once(db: None) -> None:
    """finish() and ensure() on what was finished, or is not ours, say so, also after the block."""
    with idempotent("invoice:1") as ours:
        ours.ensure()
        ours.finish(1)
        for use in (ours.finish, ours.ensure):
            with pytest.raises(ConfigurationError, match="was finished before"):
                use()
    with idempotent("invoice:1") as repeat:
        assert (bool(repeat), repeat.result) == (False, 1)
        for claim in (ours, repeat):
            for use in (claim.finish, claim.ensure):
                with pytest.raises(ConfigurationError, match="is not ours"):
                    use()


# Results.

RESULTS: Final[list[Any]] = [
    None, False, 0, 1.5, "", "é\0\ud800", [1, [2]], {"a": {"b": None}},
    datetime(2026, 11, 21, 12, 0, 1, 5, tzinfo=UTC), date(2026, 11, 21), time(12, 30),
    Decimal("1.10"), uuid.UUID(int=7), b"\x00\xff",
]  # fmt: skip


def test_a_repeat_gets_the_result(db: None) -> None:
    """Each value of kombu's JSON comes back with its type, even None and other false ones."""
    work, calls = counted(lambda number, currency: RESULTS[number])
    once = idempotent(work)
    for number, result in enumerate(RESULTS):
        for given in (once(number), once(number)):
            assert (given, type(given)) == (result, type(result))
    assert len(calls) == len(RESULTS)


def test_finish_refuses_what_can_not_be_kept(db: None) -> None:
    """finish() raises and notes nothing, so it can be called again with less."""
    with idempotent("invoice:1") as claim:
        for result in (object(), "x" * 65_536):
            with pytest.raises(InvalidResult):
                claim.finish(result)
        assert records.get().state == IdempotencyRecord.State.RUNNING
        claim.finish("less")
    assert result_of_repeat() == "less"


# The decorator.


@pytest.mark.parametrize("decorate", [idempotent, idempotent(["number", "currency"])])
def test_a_call_is_done_once_however_it_is_written(decorate: Any, db: None) -> None:
    """Bare or called, the arguments are the key, with defaults and by any spelling."""
    work, calls = counted(charge)
    once = decorate(work)
    assert [once(1), once(currency="EUR", number=1), once(1, "USD")] == ["1 EUR", "1 EUR", "1 USD"]
    assert calls == [(1, "EUR"), (1, "USD")]


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
    with hearing(CLAIM_REPEATED) as repeats:
        assert once(1) == "1 EUR"
    assert repeats[0]["key"] == f"{__name__}.charge:{text}"


@pytest.mark.parametrize("key", ["{number}", by_number])
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


def test_methods_are_done_once(db: None) -> None:
    """On a method a key says which arguments count; the others are compared, not the object."""

    class Shop:
        calls: list[int] = []

        @idempotent(key="{number}")
        def order(self, number: int, currency: str = "EUR") -> int:
            self.calls.append(number)
            return number

    assert [Shop().order(1), Shop().order(1, "EUR"), Shop().order(number=2)] == [1, 1, 2]
    assert Shop.calls == [1, 2]
    with pytest.raises(IdempotencyConflict):
        Shop().order(1, "USD")


NAMELESS: Final = {
    "lambda": lambda order: "nameless",
    "partial": functools.partial(charge, currency="USD"),
}


@pytest.mark.parametrize("function", NAMELESS.values(), ids=NAMELESS)
def test_what_has_no_name_of_its_own_is_refused(function: Callable[..., Any], db: None) -> None:
    """A lambda would share its record with all others of its module."""
    (argument, *_) = inspect.signature(function).parameters
    decorator: Any
    for decorator in (idempotent, single_instance):
        with pytest.raises(ConfigurationError, match="no name of its own"):
            decorator(key=[argument])(function)(7)
    assert not records.exists()


@shared_task(name="tests.idempotent.refused")
def refused(number: int) -> None:
    """Stand for a task."""


async def stream(number: int) -> Any:
    """Return before it is done."""
    yield number


def test_what_can_not_be_decorated_is_refused() -> None:
    """Above @shared_task it says so; an asynchronous generator returns before its work."""
    decorate: Any
    for decorate in (idempotent, idempotent(key="{number}")):
        with pytest.raises(TypeError, match="stands above the decorator that makes the task"):
            decorate(refused)
        with pytest.raises(ConfigurationError, match="returns before its body runs"):
            decorate(stream)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"key": "{nubmer}"}, "nubmer"), ({"timeout": 0}, "timeout=0"), ({"ttl": -1}, "ttl=-1")],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], sentence: str) -> None:
    """An option that means nothing is an error where it is written."""
    with pytest.raises(ConfigurationError, match=sentence):
        idempotent(**options)(charge)


# Time.


def test_what_is_over_is_done_again(db: None) -> None:
    """When ttl is over the work is done again, and its new result counts."""
    ttl = timedelta(seconds=2)
    for result in (1, 2):
        with idempotent("invoice:1", ttl=ttl) as claim:
            assert claim
            claim.finish(result)
        with idempotent("invoice:1", ttl=ttl) as claim:
            assert (bool(claim), claim.result) == (False, result)
        assert records.get().claims == result
        # The clock of records is the database's.
        names = ("ends_at", "claimed_at", "ended_at", "expires_at")
        records.update(**{name: F(name) - timedelta(seconds=3) for name in names})


def test_the_settings_say_how_long_it_counts(db: None, settings: Settings) -> None:
    """Unset, ttl is RETENTION["records"] and the lease LOCK_TIMEOUT, as they are at the call."""
    once = idempotent("invoice:1")
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"records": 100}, "LOCK_TIMEOUT": 50}
    with once as claim:
        assert claim
        record = records.annotate(now=Now()).get()
        assert 40 < (record.ends_at - record.now).total_seconds() <= 50
    record = records.annotate(now=Now()).get()
    assert 90 < (record.expires_at - record.now).total_seconds() <= 100


# Transactions.


class InPlainTestCase(TestCase):
    """Django's TestCase wraps each test in atomic(); that does not count."""

    def test_it_works(self) -> None:
        """Neither the claim nor its end needs a TransactionTestCase."""
        with idempotent("invoice:1") as claim, transaction.atomic():
            claim.finish(1)
        assert result_of_repeat() == 1
        # An atomic() of the code under test does count.
        with transaction.atomic(), pytest.raises(WrongTransaction):
            enter()


# Where the work is done, and what it gave is no result.


class Odd:
    """Something that raises when JSON asks for its form, by what no database can keep."""

    def __json__(self) -> None:
        raise AttributeError("no form\0 for \ud800")


@pytest.mark.sql
@pytest.mark.parametrize(
    "result", [Odd(), {"__type__": "invoice", "__value__": 5}], ids=["raises", "can't be read back"]
)
def test_a_result_that_json_fails_at_is_not_done_again(result: Any, db_alias: str) -> None:
    """The work is done even if its result can't be stored, and each call raises."""
    work, calls = counted(lambda number, currency: result)
    once = idempotent(key="{number}", using=db_alias)(work)
    for _ in range(2):
        with pytest.raises(InvalidResult, match="JSON can't take it"):
            once(1)
    assert len(calls) == 1


class Endless:
    """Something at which the time limit hits when JSON asks for its form."""

    def __json__(self) -> None:
        raise SoftTimeLimitExceeded


def test_a_time_limit_while_the_result_is_written_down_stays_one(db: None) -> None:
    """It leaves the work as it is, which is not done, and is done by the next who comes."""
    calls: list[Any] = []

    @idempotent("{number}")
    def work(number: int, result: Any) -> Any:
        calls.append(result)
        return result

    with hearing(CLAIM_FAILED) as failures, pytest.raises(SoftTimeLimitExceeded):
        work(1, Endless())
    assert len(failures) == 1
    assert records.get().state == IdempotencyRecord.State.FAILED
    assert work(1, "short") == "short"
    assert len(calls) == 2


# Mistakes that are refused at once.


@pytest.mark.parametrize("field", ["{pk}", "{user[pk]}", "{n:03}"])
def test_a_forgotten_f_string_is_refused(field: str, db: None) -> None:
    """A field in the key of a block would be the same for all."""
    with pytest.raises(ConfigurationError, match="Write the key as an f-string"):
        enter(f"a:{field}")


def test_it_stands_below_single_instance() -> None:
    """Above it, a run that is skipped would count as done."""
    with pytest.raises(TypeError, match="Put it below"):
        idempotent("{number}")(single_instance(key="{currency}")(charge))
    both = single_instance(key="{currency}")(idempotent("{number}")(charge))
    assert callable(both)


def test_without_its_table_it_says_what_to_run(make_database: MakeDatabase, tmp_path: Path) -> None:
    """A forgotten migration is an error that names the database and the command."""
    assert make_database  # the databases may be asked
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        what = "has no table for that. Run: manage.py migrate django_celery_safe --database=empty"
        with pytest.raises(ConfigurationError, match=what):
            idempotent(using="empty")(charge)(1)
