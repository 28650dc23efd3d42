"""Decorators and base classes that change arguments between a message and its function."""

import functools
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest

from django_celery_safe import ConfigurationError, SafeTask, iter_locks, single_instance
from tests.app.models import Person
from tests.concurrency.mailbox import Mailbox
from tests.concurrency.test_options import held_names
from tests.statements import raising

pytestmark = [pytest.mark.usefixtures("locks_in_memory"), pytest.mark.django_db(transaction=True)]

Function = Callable[..., Any]

#: What the body of each run got, and the names of the locks that were held in it.
runs: Final[list[tuple[Any, list[str]]]] = []


class Session:
    """A value that no message can hold."""


def note(x: Any) -> Any:
    """Record a run."""
    runs.append((x, sorted(held_names())))
    return x


@pytest.fixture(autouse=True)
def no_runs() -> None:
    """Begin without runs."""
    runs.clear()


def changing(change: Callable[..., tuple[Any, Any]]) -> Callable[[Function], Function]:
    """Return a decorator that passes on what ``change`` returns of the arguments."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = change(*args, **kwargs)
            return function(*args, **kwargs)

        return inner

    return decorate


with_session_first = changing(lambda *args, **kwargs: ((Session(), *args), kwargs))


class SchemaMixin:
    """Add the tenant's schema to the message, and take it out before the run."""

    def apply_async(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        kwargs = {"_schema": "acme", **(kwargs or {})}
        return super().apply_async(args, kwargs, *more, **options)  # type: ignore[misc]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("_schema", None)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


class SchemaTask(SchemaMixin, SafeTask):  # type: ignore[misc, type-arg]
    """Ours below the tenant's class."""

    abstract = True
    typing = False


def session_first(session: Session, x: Any) -> Any:
    """Get a session, and then the argument."""
    assert isinstance(session, Session)
    return note(x)


def session_last(x: Any, session: Session) -> Any:
    """Get the argument, and then a session."""
    assert isinstance(session, Session)
    return note(x)


def bound_session(self: Any, session: Session, x: Any) -> Any:
    """Get the task itself, too."""
    assert isinstance(session, Session)
    return note(x)


class Change(NamedTuple):
    """A change of arguments; ``more`` are the named arguments that its calls have beside x."""

    decorate: Callable[[Function], Function]
    function: Function
    base: Any = SafeTask
    more: dict[str, Any] = {}
    options: dict[str, Any] = {}


CHANGES: Final = {
    "session first": Change(with_session_first, session_first),
    "session by name": Change(
        changing(lambda *args, **kwargs: (args, {**kwargs, "session": Session()})), session_last
    ),
    "session after self": Change(
        changing(lambda self, *args, **kwargs: ((self, Session(), *args), kwargs)),
        bound_session,
        options={"bind": True},
    ),
    "argument taken out": Change(
        changing(lambda *args, trace=None, **kwargs: (args, kwargs)), note, more={"trace": "t"}
    ),
    "schema of a class": Change(lambda function: function, note, SchemaTask),
}
UNIQUE: Final = single_instance(on_conflict="raise", unique_until="end")


def test_a_key_that_is_not_certain_is_an_error(mailbox: Mailbox) -> None:
    """If a decorator below may add an argument first or last, a name could mean either of two."""

    @single_instance(key="{x}", unique_until="end")
    @with_session_first
    def work(session: Session, x: int, y: int) -> int:
        return x + y

    task = mailbox.task(work, base=SafeTask, name="tests.changed")
    with pytest.raises(ConfigurationError, match=r"names x, .* which of \(5, 6\) that is"):
        task.delay(5, 6)
    assert task.delay(x=5, y=6).is_duplicate is False
    assert task.delay(y=7, x=5).is_duplicate is True
    assert mailbox.deliver(mailbox.take_one()).value == 11


def test_what_a_decorator_makes_of_an_argument_keeps_calls_apart(mailbox: Mailbox) -> None:
    """A decorator that reads a row does not merge the calls of two."""

    def reading(function: Function) -> Function:
        @functools.wraps(function)
        def inner(pk: Any) -> Any:
            return function(Person(pk=pk))

        return inner

    def work(made: Any) -> Any:
        return note(made.pk)

    task = mailbox.task(reading(UNIQUE(work)), base=SafeTask, name="tests.changed")
    assert [task.delay(pk).is_duplicate for pk in (5, 6)] == [False, False]
    for message in mailbox.take():
        assert mailbox.deliver(message).state == "SUCCESS"
    assert [value for value, _ in runs] == [5, 6]
    assert runs[0][1] != runs[1][1]
    assert held_names() == []


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_retry_keeps_the_lock_of_its_send(change: Change, mailbox: Mailbox) -> None:
    """Until a retried message has ended, the same send is a duplicate."""

    def work(*args: Any, **kwargs: Any) -> Any:
        if not task.request.retries:
            raise task.retry(countdown=60)
        return change.function(*args, **kwargs)

    decorated = change.decorate(UNIQUE(functools.wraps(change.function)(work)))
    task = mailbox.task(decorated, base=change.base, name="tests.changed", **change.options)
    assert mailbox.deliver(mailbox.send(task, 5, kwargs=change.more)).state == "RETRY"
    assert task.apply_async((5,), change.more).is_duplicate is True
    assert mailbox.deliver(mailbox.take_one()).value == 5
    assert list(iter_locks()) == []
    assert task.apply_async((5,), change.more).is_duplicate is False


def test_an_error_callback_runs_alone(mailbox: Mailbox) -> None:
    """Celery calls it with the request, the error and a traceback, which no message can hold."""

    def on_error(request: Any, exc: BaseException, traceback: Any) -> None:
        note((request.id, str(exc)))

    callback = mailbox.task(single_instance(on_error), base=SafeTask, name="tests.on_error")
    task = mailbox.task(raising(ValueError("broken")), base=SafeTask, name="tests.fail")
    message = mailbox.send(task, link_error=callback.s())
    assert mailbox.deliver(message).state == "FAILURE"
    ((value, locks),) = runs
    assert value == (message.id, "broken")
    assert len(locks) == 1
