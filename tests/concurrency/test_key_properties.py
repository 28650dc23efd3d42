"""
Keys of calls by the thousand, held against what kombu delivers.

Two calls must have one key exactly if a worker gets the same from both; ``same``
tells that by comparing what arrives, part by part. ``SAFE_EXAMPLES=200000`` tries
that many for each property.
"""

import os
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from itertools import combinations_with_replacement
from math import copysign, isnan
from random import Random
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu.exceptions import SerializationError

from django_celery_safe import NotSerializable
from django_celery_safe.conf import UNSET
from tests.concurrency.test_keys import key_of, travel

#: How many examples to try for each property; unset: as many as take a few seconds.
ASKED_FOR = os.environ.get("SAFE_EXAMPLES")
EXAMPLES = int(ASKED_FOR or 300)

#: A long run takes 2 to 5 milliseconds for each example.
pytestmark = [pytest.mark.timeout(120 + int(ASKED_FOR) // 50)] if ASKED_FOR else []

many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)

# Equal values.


def same(one: Any, other: Any) -> bool:
    """Tell whether two values that arrived are alike, types and all; a tuple is a list."""
    for kinds in ((list, tuple), (set, frozenset)):
        if isinstance(one, kinds) and isinstance(other, kinds):
            return same_parts(one, other, in_order=kinds[0] is list)
    if type(one) is not type(other):
        return False
    match one:
        case dict():
            return same_parts(one.items(), other.items(), in_order=False)
        case float():
            if isnan(one) or isnan(other):
                return isnan(one) and isnan(other)
            return one == other and copysign(1, one) == copysign(1, other)
        case Decimal():
            return one.as_tuple() == other.as_tuple()
        case datetime() | time():
            zones = (one.tzinfo is None, one.utcoffset()), (other.tzinfo is None, other.utcoffset())
            return zones[0] == zones[1] and one.replace(tzinfo=None) == other.replace(tzinfo=None)
    return bool(one == other)


def same_parts(ones: Iterable[Any], others: Iterable[Any], *, in_order: bool) -> bool:
    """Tell whether each one has a partner among the others, and none is left."""
    left = list(others)
    for one in ones:
        among = left[:1] if in_order else left
        partner = next((n for n, other in enumerate(among) if same(one, other)), None)
        if partner is None:
            return False
        del left[partner]
    return not left


# Values to send.


class Grade(IntEnum):
    """A number with a name."""

    ONE = 1


class Color(StrEnum):
    """A text with a name."""

    RED = "red"


class OldColor(str, Enum):  # noqa: UP042
    """A text with a name, which is not what str() of it says."""

    RED = "red"


class OldGrade(int, Enum):
    """A number with a name, which is not what str() of it says."""

    ONE = 1


class Discreet(str):
    """A text that does not show itself."""

    def __str__(self) -> str:
        return "***"


class Money:
    """A thing that says how it wants to be sent."""

    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __json__(self) -> dict[str, int]:
        return {"cents": self.cents}


class Point(NamedTuple):
    """A tuple with names."""

    x: int
    y: int


NOON = datetime(2026, 11, 1, 12)
TYPED = [
    NOON,
    NOON.replace(tzinfo=UTC),
    NOON.replace(tzinfo=timezone(timedelta(hours=1))),
    NOON.replace(tzinfo=ZoneInfo("Europe/Berlin")),
    NOON.isoformat(),
    NOON.date(),
    NOON.time(),
    NOON.time().replace(tzinfo=UTC),
    UUID(int=1),
    UUID(int=1).hex,
    Decimal(1),
    Decimal("1.0"),
    Decimal("-0"),
    Decimal("NaN"),
    b"",
    b"1",
    b"\xff",
]
#: Values that are easily mistaken for each other, and such as JSON changes.
ALIKE: list[Any] = [
    *(None, "None", "null", "N", "", "1", "1.0", "True", "true", "i1;", "s1:1", "[]", "a", "b"),
    *("ab", "é", unicodedata.normalize("NFD", "é"), "Å", "\u212b", "\ud800", "\udc00", "a\x00b"),
    *("\ud800\udc00", "\U00010000", {"\ud800\udc00": 1}, {"\U00010000": 1}),
    *(True, False, 1, 0, -1, 1.0, 0.0, -0.0, float("nan"), -float("nan"), float("inf"), 1e300),
    *(10**300, 10**300 + 1, -(10**300), 2**53, 2**53 + 1, float(2**53), 10**4000),
    *([], (), {}, [[]], [{}], {"": None}, {"": []}, [None], ["a", "b"], ["ab"], ["a", ["b"]]),
    *(["a", "b", []], [["a"], "b"], [["a", "b"]], ["a;sb"], 0.3, 0.1 + 0.2),
    *({"a": "b"}, {"b": "a"}, {"a": "b", "b": "a"}, {"ab": ""}),
    *({1: "x"}, {"1": "x"}, {1.0: "x"}, {"1.0": "x"}, {True: "x"}, {"true": "x"}, {"True": "x"}),
    *({None: "x"}, {"null": "x"}, {1: "x", "1": "y"}, {"1": "y", 1: "x"}, {float("nan"): "x"}),
    *({"x": {2: (3,)}}, {"x": {"2": [3]}}, {Grade.ONE: "x"}, {Color.RED: 1}, {"red": 1}),
    *({"__type__": "date", "__value__": "2026-11-01"}, {"__type__": "date"}, {"__value__": 1}),
    *({"__type__": "date", "__value__": "2026-11-01", "x": 1}, {"__type__": 1}, ["__type__"]),
    *({"__type__": "bytes", "__value__": "1"}, {"x": {"__type__": "decimal", "__value__": "1"}}),
    *(Grade.ONE, OldGrade.ONE, Color.RED, OldColor.RED, "red", Discreet("red"), "***"),
    *(Money(1), {"cents": 1}, Point(1, 0), [1, 0], OrderedDict(a=1, b=2), {"b": 2, "a": 1}),
    *TYPED,
]

texts = st.text(st.characters(), max_size=4)
scalars = (
    st.sampled_from(ALIKE)
    | texts
    | st.integers()
    | st.floats()
    | st.binary(max_size=4)
    | st.datetimes(timezones=st.sampled_from([None, UTC, ZoneInfo("Europe/Berlin")]))
    | st.decimals()
    | st.uuids()
)
names = st.sampled_from([value for value in ALIKE if type(value) in (str, int, float, bool)])


def nested(leaves: st.SearchStrategy[Any], names: st.SearchStrategy[Any]) -> Any:
    """Return a strategy for such values, alone or in lists, tuples and dicts."""
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(names, inner, max_size=3)
        ),
        max_leaves=4,
    )


values = nested(scalars, names)
seeds = st.integers(0, 2**32).map(Random)

#: Changes that a careless key might miss.
MISTAKES: list[Callable[[Any], Any]] = [
    *(bool, int, float, str, repr, list, "".join, Decimal, lambda value: [value]),
    *(lambda value: -value, lambda value: value.encode(), lambda value: value.isoformat()),
    *(lambda value: value.lower(), lambda value: unicodedata.normalize("NFD", value)),
    *(lambda value: value[1:], lambda value: {"a": value}, lambda value: [*value, None]),
]


def rewritten(value: Any, random: Random, serializer: str = "json", mistakes: float = 0.1) -> Any:
    """Return the value written otherwise; with mistakes it may become another, but can be sent."""

    def rewrite(value: Any) -> Any:
        if random.random() < mistakes:
            with suppress(TypeError, ValueError, ArithmeticError, AttributeError, LookupError):
                return random.choice(MISTAKES)(value)
        if isinstance(value, (list, tuple)):
            return random.choice([list, tuple])(map(rewrite, value))
        if type(value) is dict:
            items = random.sample(list(value.items()), len(value))
            return {rename(key): rewrite(item) for key, item in items}
        return value

    def rename(key: Any) -> Any:
        return str(key) if type(key) is int and random.random() < 0.3 else key

    other = rewrite(value)
    try:
        travel(other, serializer)
    except SerializationError:
        return value
    return other


# Keys of values.


def test_keys_are_equal_exactly_for_what_arrives_alike() -> None:
    """Two values have one key if, and only if, JSON delivers the same; on arrival, too."""
    seen: Counter[bool] = Counter()

    @many
    @given(values, seeds)
    def check(one: Any, random: Random) -> None:
        other = rewritten(one, random)
        alike = same(travel(one), travel(other))
        seen[alike] += 1
        assert (key_of(one) == key_of(other)) is alike
        assert key_of(one) == key_of(travel(one)) == key_of(travel(travel(one)))

    check()
    assert min(seen[True], seen[False]) > EXAMPLES / 20


def test_everything_that_looks_alike_is_told_apart() -> None:
    """Each pair of values that are easily mistaken has one key exactly if it arrives alike."""
    for wrap in (lambda x: x, lambda x: [x], lambda x: ("a", x), lambda x: {"a": {1: x}}):
        sent = [wrap(value) for value in ALIKE]
        arrived, keys = list(map(travel, sent)), list(map(key_of, sent))
        wrong = [
            (sent[i], sent[j])
            for i, j in combinations_with_replacement(range(len(sent)), 2)
            if (keys[i] == keys[j]) is not same(arrived[i], arrived[j])
        ]
        assert wrong == []


#: Values that only pickle can send. Times have offsets of their own: pickle keeps their zones.
picklable = nested(
    st.sampled_from([*TYPED, None, True, False, 1, 0, 1.0, -0.0, "1", "", "a", "\ud800", 10**4000])
    | texts
    | st.integers()
    | st.floats()
    | st.timedeltas()
    | st.sets(st.integers(-1, 2) | texts | st.booleans() | st.binary(max_size=2), max_size=3)
    | st.frozensets(st.tuples(texts, st.integers(-1, 2)), max_size=3),
    names | st.tuples(texts, st.integers(-1, 2)) | st.dates(),
)


def test_keys_of_what_pickle_delivers_alike() -> None:
    """With pickle, sets, timedeltas and dict keys of all types count as they are."""
    seen: Counter[bool] = Counter()

    @many
    @given(picklable, seeds)
    def check(one: Any, random: Random) -> None:
        other = rewritten(one, random, "pickle")
        arrived = travel(one, "pickle"), travel(other, "pickle")
        alike = same(*arrived)
        seen[alike] += 1
        keys = [key_of(value, serializer="pickle") for value in (one, other, *arrived)]
        assert (keys[0] == keys[1]) is alike
        assert keys[:2] == keys[2:]

    check()
    assert min(seen[True], seen[False]) > EXAMPLES / 20


class Secret:
    """A value that can't be sent, and whose repr shows a secret."""

    def __repr__(self) -> str:
        return "s3cret"


@many
@given(nested(scalars | st.just(Secret()), names), st.sampled_from([UNSET, ["b", "a"]]), seeds)
def test_what_can_not_be_sent_has_no_key(value: Any, rule: Any, random: Random) -> None:
    """An object anywhere in an argument is refused without showing it, never told by its repr."""
    value = random.choice([[value, Secret()], {1: Secret(), "x": value}, ({"x": (Secret(),)},)])
    with pytest.raises(NotSerializable, match=r"^b of task .* is a (Secret|Money)") as caught:
        key_of(1, value, key=rule)
    assert "s3cret" not in str(caught.value)


# Careless values.


def test_times_of_other_zones_are_told_apart_with_pickle() -> None:
    """Pickle delivers a time's zone, also one whose offset depends on the day."""
    zones = (None, ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Tokyo"))
    assert len({key_of(time(12, tzinfo=zone), serializer="pickle") for zone in zones}) == 3


@pytest.mark.parametrize("wrap", [lambda x: [x], lambda x: {"a": x}], ids=["list", "dict"])
def test_what_is_nested_deep_has_a_key_or_is_refused(wrap: Callable[[Any], Any]) -> None:
    """Nesting that JSON can send is no RecursionError, and its depth counts."""
    value: Any = 1
    for _ in range(700):
        value = wrap(value)
    assert travel(value)
    with suppress(NotSerializable):
        assert key_of(value) == key_of(value) != key_of(wrap(value))


def test_what_contains_itself_is_refused() -> None:
    """A list within itself can't be sent, and the error names the argument."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotSerializable, match=r"^b of task tests\.example"):
        key_of(1, endless)


@pytest.mark.parametrize("rule", ["{a}{b}", lambda a, b: a + b])
def test_a_key_arrives_as_it_was_made(rule: Any) -> None:
    """JSON makes one character of two halves, in arguments as in the key of a header."""
    assert travel("\ud800\udc00") == "\U00010000"
    key = key_of("\ud800", "\udc00", key=rule)
    assert travel(key) == key == key_of("\U00010000", "", key=rule)
