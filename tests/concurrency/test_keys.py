"""The keys of calls, by example; ``test_key_properties`` has what holds for all values."""

from collections.abc import Callable
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any
from uuid import UUID

import pytest
from kombu.serialization import dumps, loads

from django_celery_safe import ConfigurationError, NotSerializable, single_instance
from django_celery_safe.concurrency.keys import DIGITS, call_key
from django_celery_safe.concurrency.options import DEFAULTS, Guarded
from django_celery_safe.conf import UNSET

UUID_1 = UUID("00000000-0000-0000-0000-000000000001")


class Shade(Enum):
    """A value that no message can carry."""

    DARK = 1


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
    guarded = Guarded(function, options, bound)
    return call_key("tests.example", guarded, args, kwargs, serializer=serializer)


def travel(value: Any, serializer: str = "json") -> Any:
    """Return the value as a worker gets it."""
    content_type, encoding, data = dumps(value, serializer)
    return loads(data, content_type, encoding, accept={content_type})


@pytest.mark.parametrize("key", [UNSET, lambda a, b: (a, b), "{a}-{b}"])
def test_it_does_not_matter_how_a_call_is_written(key: Any) -> None:
    """Position, keyword and default are the same call, also for a function and a template."""
    same = {key_of(1, key=key), key_of(1, 2, key=key), key_of(b=2, a=1, key=key)}
    assert len(same) == 1
    assert key_of(1, key=key) != key_of(1, 3, key=key)


def test_arguments_of_every_kind_have_names() -> None:
    """Names of keyword arguments, ``*args`` and ``**kwargs`` tell arguments apart, and choose."""

    def task(first: Any, /, *rest: Any, only: Any = 0, **named: Any) -> None: ...

    calls: list[dict[str, Any]] = [{}, {"only": 2}, {"other": 2}, {"rest": 2}, {"first": 2}]
    assert len({key_of(1, function=task, **call) for call in calls}) == len(calls)
    assert key_of(1, 2, function=task, key=["rest"]) == key_of(9, 2, function=task, key=["rest"])
    assert key_of(1, function=task, key="{named[x]}", x="y") == "y"


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("feed-{a}-{b}", "feed-7-2026-11-01 00:00:00"),
        ("{a:05d}/{b:%Y-%m}/{b.year}", "00007/2026-11/2026"),
        ("{a:{a}d}{a!r}{{}}", "      77{}"),
    ],
)
def test_a_template_stands_in_the_key_as_it_is(key: str, expected: str) -> None:
    """A format string is filled in as Python does, with attributes, conversions and specs."""
    assert key_of(7, datetime(2026, 11, 1), key=key) == expected


def test_a_template_sees_what_arrives() -> None:
    """Items can be named, a tuple reads as a list, and the order of a dict does not count."""
    assert key_of({"user": {"pk": 5}}, [8, 9], key="{a[user][pk]}/{b[1]}") == "5/9"
    assert key_of((1, 2), key="{a}") == key_of([1, 2], key="{a}") == "[1, 2]"
    one, other = {"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"d": 3, "c": 2}], "a": 1}
    assert key_of(one, key="{a}-{b}") == key_of(other, key="{a}-{b}")


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


@pytest.mark.parametrize("value", [7, {"x": {1, 2}}, UUID_1])
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


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (None, r"tests\.example returned None.*Return a str"),
        ([object()], r"tests\.example returned a object"),
    ],
)
def test_a_key_function_that_returns_no_plain_value_is_an_error(value: Any, sentence: str) -> None:
    """An object has no text that is the same in two processes; None is a forgotten return."""
    with pytest.raises(ConfigurationError, match=sentence):
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
    with pytest.raises(NotSerializable, match="a Shade"):
        key_of(Shade.DARK)


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

    guarded = Guarded(work, DEFAULTS, bound=False)

    def key(args: tuple[Any, ...], kwargs: dict[str, Any], *sent: Any) -> str:
        return call_key("tests.example", guarded, args, kwargs, serializer="pickle", sent=sent)

    with pytest.raises(ConfigurationError, match="its argument args, which is or holds a Fraction"):
        key((third := Fraction(1, 3),), {}, third)
    made = {key((), {"note": note, "session": object()}, note) for note in ("a", "b", "a")}
    made |= {key((object(), note), {}, note) for note in ("a", "b", "a")}
    assert len(made) == 4


def test_the_task_itself_is_no_part_of_the_key() -> None:
    """The self of a bound task is left out, whatever the form of key."""

    def task(self: Any, a: Any, b: Any = 2) -> None: ...

    assert key_of(1, function=task, bound=True) == key_of(1)
    assert key_of(1, function=task, bound=True, key="{a}{b}") == "12"
    assert key_of(1, function=task, bound=True, key=lambda a, b: [a, b]) == key_of(
        1, key=lambda a, b: [a, b]
    )


@pytest.mark.parametrize("key", ["{task}", ["task", "a"]])
def test_a_key_that_names_the_task_itself_is_an_error(key: Any) -> None:
    """Naming the bound task, by whatever name, says that it tells no calls apart."""

    def task(task: Any, a: Any) -> None: ...

    with pytest.raises(ConfigurationError, match="'task', which is the task itself"):
        key_of(1, function=task, bound=True, key=key)


def test_arguments_that_do_not_fit_are_a_type_error() -> None:
    """A call that Python would refuse has no key."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'c'"):
        key_of(1, c=2)


def test_keys_do_not_depend_on_the_process() -> None:
    """A key is the same on every machine and in every release: messages carry it."""
    stamp = [date(2026, 11, 1), time(12), Decimal("1.50"), UUID_1, {"x": {"y"}, "z": 1.5}]
    assert key_of(stamp, b"\xff") == "75e4aa87dc5a75374988c4a36f1c521d"
