"""The keys of calls: equal keys make calls the same."""

import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kombu.serialization import dumps, loads

from django_celery_safe import (
    ConfigurationError,
    NotSerializable,
    idempotent,
    iter_locks,
    single_instance,
)
from django_celery_safe.concurrency.keys import DIGITS, call_key
from django_celery_safe.conf import UNSET

#: Few examples and no file of past failures: the whole suite has four minutes.
fast = settings(max_examples=60, deadline=None, database=None)

FEED = "https://example.org/private?token=s3cret"
UUID_1 = UUID("00000000-0000-0000-0000-000000000001")


def example(a: Any = None, b: Any = 2) -> None:
    """Stand for a task."""


def key_of(
    *args: Any,
    function: Callable[..., Any] = example,
    key: Any = UNSET,
    serializer: str = "json",
    bound: bool = False,
    **kwargs: Any,
) -> str:
    """Return the key of a call of ``function`` under ``@single_instance(key=key)``."""
    options = single_instance(key=key)(function).single_instance  # type: ignore[attr-defined]
    return call_key(
        "tests.example", function, options.key, args, kwargs, bound=bound, serializer=serializer
    )


def travel(value: Any, serializer: str = "json") -> Any:
    """Return the value as a worker gets it."""
    content_type, encoding, data = dumps(value, serializer)
    return loads(data, content_type, encoding, accept={content_type})


# Names of types and letters of the encoding stand among the texts, to provoke mix-ups.
texts = st.sampled_from(["", "1", "1.0", "True", "None", "N", "T", "i1;", "s1:1", "[]"]) | st.text()
json_scalars = st.none() | st.booleans() | st.integers(-1, 2) | st.integers() | st.floats() | texts
json_values = st.recursive(
    json_scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=6
)
scalars = (
    json_scalars
    | st.binary()
    | st.datetimes(timezones=st.none() | st.just(UTC) | st.timezones())
    | st.dates()
    | st.times()
    | st.decimals(allow_nan=False)
    | st.uuids()
)
names = texts | st.integers() | st.booleans() | st.none() | st.floats()
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(names, inner)
        | st.fixed_dictionaries({"__type__": st.just("date"), "__value__": st.just("2026-11-01")})
    ),
    max_leaves=8,
)


@fast
@given(values)
def test_a_key_is_the_same_before_and_after_the_journey(value: Any) -> None:
    """A call has one key at the send and on arrival, though JSON changes tuples and dict keys."""
    assert key_of(value) == key_of(travel(value))


@fast
@given(values | st.sets(scalars) | st.timedeltas())
def test_a_key_is_the_same_after_a_journey_by_pickle(value: Any) -> None:
    """Values that only pickle can send keep their key too."""
    arrived = travel(value, "pickle")
    assert key_of(value, serializer="pickle") == key_of(arrived, serializer="pickle")


@fast
@given(json_values, json_values)
def test_keys_are_equal_exactly_for_equal_values(one: Any, other: Any) -> None:
    """Two values have one key if, and only if, they are the same JSON (names in any order)."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (key_of(one) == key_of(other)) is same


@fast
@given(st.lists(texts, min_size=2, max_size=2), st.lists(texts, min_size=2, max_size=2))
def test_text_never_moves_from_one_argument_to_the_next(one: list[str], other: list[str]) -> None:
    """Arguments are told apart even where their texts put together are the same."""
    assert (key_of(*one) == key_of(*other)) is (one == other)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"deep": [x]}])
def test_values_that_look_alike_have_keys_of_their_own(wrap: Callable[[Any], Any]) -> None:
    """1, "1", 1.0, True, None and their like are different, nested too."""
    moment = datetime(2026, 11, 1, 12)
    alike: list[Any] = [1, "1", 1.0, True, b"1", Decimal(1), None, "None", "", [], {}, [None]]
    alike += [False, 0, 0.0, -0.0, UUID_1, str(UUID_1), Decimal("1.0"), float("nan"), float("inf")]
    alike += [moment, moment.replace(tzinfo=UTC), moment.isoformat(), moment.date(), moment.time()]
    keys = [key_of(wrap(value)) for value in alike]
    assert len(set(keys)) == len(alike)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((1, (2, 3)), [1, [2, 3]]),
        ({"x": 1, "y": {"p": 1, "q": 2}}, {"y": {"q": 2, "p": 1}, "x": 1}),
        ({1: "one"}, {"1": "one"}),
        (StrEnum("Color", {"RED": "red"}).RED, "red"),  # type: ignore[attr-defined]
        (
            datetime(2026, 11, 1, 12, tzinfo=UTC),
            datetime(2026, 11, 1, 12, tzinfo=timezone(timedelta(0), "Zulu")),
        ),
    ],
    ids=["tuple and list", "order of names", "names are text", "enum of str", "two names of UTC"],
)
def test_values_that_arrive_alike_have_one_key(one: Any, other: Any) -> None:
    """Two values that arrive as equal have one key."""
    assert key_of(one) == key_of(other)


def test_normal_forms_of_unicode_stay_apart() -> None:
    """Text is compared by code points, as Python does: é is not e with an accent."""
    composed, decomposed = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    assert key_of(composed) != key_of(decomposed)
    assert key_of(composed, key="{a}") != key_of(decomposed, key="{a}")


def test_numbers_too_long_to_print_have_keys() -> None:
    """An int of more than 4300 digits, which Python refuses to write in decimal, has a key."""
    huge = 10**5000
    keys = {key_of(huge), key_of(huge + 1), key_of(-huge), key_of([huge])}
    assert len(keys) == 4
    assert key_of(huge, serializer="pickle") == key_of(huge)


@pytest.mark.parametrize("key", [UNSET, ["a", "b"], lambda a, b: (a, b), "{a}-{b}"])
def test_it_does_not_matter_how_a_call_is_written(key: Any) -> None:
    """Position, keyword and default are the same call, for every form of key."""
    written: list[tuple[Sequence[Any], Mapping[str, Any]]] = [
        ((1,), {}),
        ((1, 2), {}),
        ((1,), {"b": 2}),
        ((), {"a": 1, "b": 2}),
        ((), {"b": 2, "a": 1}),
    ]
    assert len({key_of(*args, key=key, **kwargs) for args, kwargs in written}) == 1
    assert key_of(1, key=key) != key_of(1, 3, key=key)


def test_arguments_of_every_kind_count() -> None:
    """Keyword-only, *args and **kwargs are part of the key, each under its own name."""

    def task(first: Any, /, *rest: Any, only: Any = 0, **named: Any) -> None: ...

    calls: list[tuple[Sequence[Any], Mapping[str, Any]]] = [
        ((1,), {}),
        ((1, 2), {}),
        ((1, 2, 3), {}),
        ((1, (2, 3)), {}),
        ((1,), {"only": 2}),
        ((1,), {"other": 2}),
        ((1,), {"other": 2, "more": 3}),
        ((1,), {"rest": 2}),
        ((1,), {"first": 1}),
    ]
    keys = {key_of(*args, function=task, **kwargs) for args, kwargs in calls}
    assert len(keys) == len(calls)
    assert key_of(1, function=task) == key_of(1, function=task, only=0)
    assert key_of(1, function=task, p=1, q=2) == key_of(1, function=task, q=2, p=1)
    assert key_of(1, 2, function=task, key=["rest"]) == key_of(9, 2, function=task, key=["rest"])
    assert key_of(1, function=task, key="{named[x]}", x="y") == "y"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("{a}", "7"),
        ("feed-{a}-{b}", "feed-7-2026-11-01 00:00:00"),
        ("{a:05d}", "00007"),
        ("{b:%Y-%m}", "2026-11"),
        ("{b.year}", "2026"),
        ("{a:{a}d}", "      7"),
        ("{a!r}{{}}", "7{}"),
    ],
)
def test_a_template_stands_in_the_key_as_it_is(key: str, expected: str) -> None:
    """A format string is filled in as Python does, with attributes, conversions and specs."""
    assert key_of(7, datetime(2026, 11, 1), key=key) == expected


def test_a_template_reads_into_its_arguments() -> None:
    """Items of dicts and lists can be named."""
    assert key_of({"user": {"pk": 5}}, [8, 9], key="{a[user][pk]}/{b[1]}") == "5/9"


def test_a_template_sees_what_arrives() -> None:
    """A tuple reads as the list that the worker gets, so send and run agree."""
    assert key_of((1, 2), key="{a}") == key_of([1, 2], key="{a}") == "[1, 2]"


def test_a_list_of_names_chooses_the_arguments_that_count() -> None:
    """Only the named arguments are part of the key; none makes all calls one."""
    assert key_of(1, 2, key=["a"]) == key_of(1, 3, key=["a"]) != key_of(2, 2, key=["a"])
    assert key_of(1, 2, key=("a",)) == key_of(1, 2, key=["a", "a"]) == key_of(1, 2, key=["a"])
    assert key_of(1, 1, key=["a"]) != key_of(1, 1, key=["b"])
    assert key_of(1, 2, key=[]) == key_of("x", {}, key=[])


def test_a_text_from_a_key_function_is_used_as_it_is() -> None:
    """A key function that returns a str decides on the whole key, the empty one included."""
    assert key_of("Ab", 1, key=lambda a, b: a.lower()) == "ab"
    assert key_of("Ab", 1, key=lambda a, b: "") == ""


@pytest.mark.parametrize("value", [7, 7.0, True, ("x", 1), {"x": {1, 2}}, UUID_1, b"7"])
def test_other_values_from_a_key_function_are_hashed(value: Any) -> None:
    """A key function may return any plain value; equal ones are equal keys."""
    key = key_of(1, key=lambda a, b: value)
    assert len(key) == DIGITS
    assert key != key_of(1, key=lambda a, b: [value])
    assert key == key_of(2, 3, key=lambda a, b: value)


def test_a_key_function_gets_what_arrives_with_defaults() -> None:
    """A key function is called like the task, with the arguments as the worker gets them."""
    seen: list[Any] = []

    def key(a: Any, *, b: Any = 2) -> str:
        seen.append((a, b))
        return "k"

    def task(a: Any, *, b: Any = 2) -> None: ...

    key_of((1, 2), function=task, key=key)
    key_of([{3: 4}], function=task, key=key)
    assert seen == [([1, 2], 2), ([{"3": 4}], 2)]


def test_a_key_function_that_returns_none_is_an_error() -> None:
    """A forgotten return is no key; the error names the task and says what to return."""
    with pytest.raises(ConfigurationError, match=r"tests\.example returned None.*Return a str"):
        key_of(1, key=lambda a, b: None)


@pytest.mark.parametrize("value", [object(), [object()], example])
def test_a_key_function_that_returns_no_plain_value_is_an_error(value: Any) -> None:
    """An object has no text that is the same in two processes."""
    with pytest.raises(ConfigurationError, match=r"tests\.example returned a (object|function)"):
        key_of(1, key=lambda a, b: value)


def test_a_default_that_can_not_travel_is_one_key() -> None:
    """A sentinel default, which only the worker has, is told apart from every given value."""

    def task(a: Any, b: Any = example) -> None: ...

    assert key_of(1, function=task) == key_of(a=1, function=task) != key_of(1, None, function=task)
    assert key_of(1, function=task) != key_of(1, "default", function=task)


def test_a_given_argument_that_can_not_travel_is_an_error() -> None:
    """It names task and argument, and says how to leave the argument out."""
    with pytest.raises(NotSerializable, match=r'^b of task tests\.example is a object.*key=\["…"]'):
        key_of(1, b=object())
    assert key_of(1, b=object(), key=["a"]) == key_of(1, key=["a"])


def test_what_can_be_sent_but_not_be_a_key_is_an_error_of_the_key() -> None:
    """A pickled argument may have no form to compare: the error says so, and what to do."""
    sentence = (
        r"The key of task tests\.example can't be made of its argument b, which is or holds a "
        r"Fraction: the serializer 'pickle' can send it, .*key=\[\"…\"\]"
    )
    with pytest.raises(ConfigurationError, match=sentence):
        key_of(1, b=Fraction(1, 3), serializer="pickle")
    with pytest.raises(NotSerializable, match="is a Fraction, which can't be sent"):
        key_of(1, b=Fraction(1, 3))
    assert key_of(1, b=Fraction(1, 3), key=["a"], serializer="pickle")


def test_arguments_of_any_number_count_though_one_is_added() -> None:
    """A message's values keep calls apart; one that can't be a key is added, or is an error."""

    def work(*args: Any, **options: Any) -> None: ...

    def key(args: tuple[Any, ...], kwargs: dict[str, Any], *sent: Any) -> str:
        return call_key("tests.example", work, UNSET, args, kwargs, serializer="pickle", sent=sent)

    with pytest.raises(ConfigurationError, match="its argument args, which is or holds a Fraction"):
        key((third := Fraction(1, 3),), {}, third)
    made = {key((), {"note": note, "session": object()}, note) for note in ("a", "b", "a")}
    made |= {key((object(), note), {}, note) for note in ("a", "b", "a")}
    assert len(made) == 4


class Shade(Enum):
    """Nothing that a message can hold."""

    DARK = 1


def test_an_enum_is_no_argument() -> None:
    """An Enum among the arguments is refused, not hashed by its name."""
    with pytest.raises(NotSerializable, match="a Shade"):
        key_of(Shade.DARK)


def test_the_task_itself_is_no_part_of_the_key() -> None:
    """The self of a bound task is left out, whatever the form of key."""

    def task(self: Any, a: Any, b: Any = 2) -> None: ...

    assert key_of(1, function=task, bound=True) == key_of(1)
    assert key_of(1, function=task, bound=True, key="{a}{b}") == "12"
    assert key_of(1, function=task, bound=True, key=lambda a, b: [a, b]) == key_of(
        1, key=lambda a, b: [a, b]
    )


@pytest.mark.parametrize("key", [["task"], "{task}", ["task", "a"]])
def test_a_key_that_names_the_task_itself_is_an_error(key: Any) -> None:
    """Naming the bound task, by whatever name, says that it tells no calls apart."""

    def task(task: Any, a: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="'task', which is the task itself"):
        key_of(1, function=task, bound=True, key=key)


def test_arguments_that_do_not_fit_are_a_type_error() -> None:
    """A call that Python would refuse has no key."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        key_of(1, c=2)


@pytest.mark.parametrize("key", [UNSET, ["a"], lambda a, b: [a]])
def test_hashed_keys_show_nothing_of_the_arguments(key: Any) -> None:
    """No argument stands in clear text in a hashed key, which ends up in logs and terminals."""
    found = key_of(FEED, key=key)
    assert len(found) == DIGITS
    assert set(found) <= set("0123456789abcdef")


def test_keys_do_not_depend_on_the_process() -> None:
    """A key is the same on every machine and in every release: messages carry it."""
    stamp = [date(2026, 11, 1), time(12), Decimal("1.50"), UUID_1, {"x": {"y"}, "z": 1.5}]
    assert key_of(stamp, b"\xff") == "6f11827d36f065596a8f422dd152eed3"


def test_the_name_of_the_lock_begins_with_the_task(locks_in_memory: None) -> None:
    """Locks of different tasks never meet, and an operator sees whose they are."""
    seen: list[str] = []

    @single_instance(key="{a}")
    def named(a: int) -> None:
        seen.extend(lock.name for lock in iter_locks())

    named(7)
    assert seen == [f"{__name__}.{named.__qualname__}:7"]


def test_equal_dicts_are_one_text() -> None:
    """The order in which a dict was filled is no part of a format string's key, nested too."""
    one = {"a": 1, "b": [{"c": 2, "d": 3}]}
    other = {"b": [{"d": 3, "c": 2}], "a": 1}
    assert key_of(one, key="{a}-{b}") == key_of(other, key="{a}-{b}")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ({"a"}, r"key=\{'a'\} can't say .* Did you mean key=\"\{a\}\"\?"),
        ({"a": 1}, r"key=\{'a': 1\} can't say"),
        (lambda a: a, r"key function .* takes \(a\), and it gets .*: \(a, b, c\)"),
        (lambda a, b: a, r"takes \(a, b\), and it gets all arguments"),
        (lambda a, b, d: a, r"takes \(a, b, d\), and it gets all arguments"),
        (lambda a, b, c, d: a, r"takes \(a, b, c, d\), and it gets all arguments"),
    ],
)
@pytest.mark.parametrize("decorate", [single_instance, idempotent])
def test_a_key_that_could_only_fail_in_the_worker_is_refused(
    decorate: Any, key: Any, sentence: str
) -> None:
    """At import: a set instead of a format string, and a function that takes other arguments."""

    def task(a: int, b: int = 2, *, c: int = 3) -> None:
        """Stand for a task."""

    with pytest.raises(ConfigurationError, match=sentence):
        decorate(key=key)(task)


@pytest.mark.parametrize("key", [lambda a, b: a, lambda b: b, lambda *all: all])
def test_a_key_function_takes_the_task_itself_or_not(key: Any) -> None:
    """Only the decorator that makes the task says whether the function's first argument is it."""
    assert single_instance(key=key)(example)
