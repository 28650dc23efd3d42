"""A project's own task class, whose methods are part of a send and of a run."""

from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from itertools import cycle
from typing import Any

import pytest
from celery import chain, shared_task
from celery.contrib.django.task import DjangoTask
from django.db import connections, transaction

from django_celery_safe import SafeTask, SafeTaskMixin, current_claim, send_on_commit, stages
from django_celery_safe.models import StageStep
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.routing import AllIn, routed_by
from tests.sending.carrying import Carried
from tests.sending.published import Published

#: Where a class may raise.
PLACES = ("before_start", "before the call", "after the call")


class Own(SafeTask[Any, Any]):
    """A task class that calls the task in a block, and raises where its test says so."""

    abstract = True
    errors: dict[str, Exception]
    block: Any
    passed: list[str]

    def pass_by(self, place: str) -> None:
        """Note the place; raise the test's error for it."""
        self.passed.append(place)
        if place in self.errors:
            raise self.errors[place]

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Raise if the test says so."""
        self.pass_by("before_start")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task; raise before or after it if the test says so."""
        with self.block():
            self.pass_by("before the call")
            result = self.run(*args, **kwargs)
            self.pass_by("after the call")
        return result


class Heir(Own):
    """A class that calls the ``__call__()`` of its parent."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task as the parent does."""
        return super().__call__(*args, **kwargs)


class Owned(Carried):
    """A carried task of that class."""

    def __init__(self, mailbox: Mailbox, alias: str) -> None:
        self.passed: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.block: Any = nullcontext
        super().__init__(mailbox, alias)

    def make_task(self, name: str, decorate: Any = None, **options: Any) -> Any:
        """Make a task of the class."""
        own = {"errors": self.errors, "passed": self.passed, "block": lambda _: self.block()}
        return super().make_task(name, decorate, **{"base": Own, **own, **options})

    def states(self) -> list[str]:
        """Return the states of all rows."""
        return [row.state for row in self.rows.all()]


@pytest.fixture
def owned(mailbox: Mailbox, make_database: MakeDatabase) -> Owned:
    """A carried task of a project's own class."""
    return Owned(mailbox, make_database("sqlite-immediate"))


@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_the_class_fails_the_row(place: str, owned: Owned) -> None:
    """As Celery fails the task, so that it is not sent again; autoretry is about the task only."""
    task = owned.make_task("tests.own", autoretry_for=(LookupError,), max_retries=3)
    owned.errors[place] = LookupError("no such tenant")
    message = owned.send(1, task=task)
    assert owned.mailbox.deliver(message).state == "FAILURE"
    row = owned.row
    assert (row.state, row.error_type, row.error) == ("failed", "LookupError", "no such tenant")
    assert row.traceback
    assert owned.calls == ([1] if place == PLACES[-1] else [])
    del owned.errors[place]
    assert owned.rows.revive() == 1
    assert owned.run_again().state == "SUCCESS"
    assert owned.states() == []


def test_a_class_that_calls_the_task_in_a_transaction(owned: Owned) -> None:
    """``finish()`` commits with it, and the row ends after it."""
    owned.block = lambda: transaction.atomic(using=owned.alias)
    heir = owned.make_task("tests.own", base=Heir)
    assert owned.run(lambda task: current_claim().finish("done"), task=heir) == ("SUCCESS", None)
    assert (owned.states(), owned.calls) == ([], [None])
    owned.errors["after the call"] = LookupError()
    assert owned.mailbox.deliver(owned.send()).state == "FAILURE"
    assert owned.states() == ["failed"]


def test_no_statement_of_ours_is_inside_the_class(owned: Owned) -> None:
    """A class that lets no task touch the database has nothing to complain about."""
    seen: list[str] = []

    def refuse(execute: Any, sql: str, *args: Any) -> Any:
        seen.append(sql)
        return execute(sql, *args)

    owned.block = lambda: connections[owned.alias].execute_wrapper(refuse)
    message = owned.send(7)
    # A message that is done already runs none of the hooks.
    assert [owned.mailbox.deliver(message).state for _ in range(2)] == ["SUCCESS", "IGNORED"]
    assert (seen, owned.states(), owned.calls) == ([], [], [7])
    assert owned.passed == list(PLACES)


def test_an_error_of_the_class_fails_a_step(owned: Owned, mailbox: Mailbox) -> None:
    """A step whose task never begins fails like one that fails in its task."""
    with routed_by(AllIn(owned.alias)):
        step = owned.make_task("tests.step", stages.step, outbox=None)
        owned.errors["before_start"] = LookupError("no such tenant")
        stages.start([(step, 1)])
        assert mailbox.deliver(mailbox.take_one()).state == "FAILURE"
        row = StageStep.objects.get()
    assert (row.status, row.error_type, row.error) == ("failed", "LookupError", "no such tenant")


# A class whose ``apply_async`` adds to what each send carries.


#: The acting user, as a middleware sets it for each request.
acting: ContextVar[str] = ContextVar("acting", default="nobody")


class ActingMixin:
    """Adds who acts to the arguments of each send."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        """Send the task with who acts, after all who are there already."""
        kwargs = dict(kwargs or {})
        kwargs["by"] = [*kwargs.get("by", ()), acting.get()]
        return super().apply_async(args, kwargs, **options)  # type: ignore[misc]


class ActingTask(ActingMixin, DjangoTask):
    """A project's class from before the package."""

    abstract = True


class OwnMethod(ActingMixin, SafeTaskMixin, DjangoTask):  # type: ignore[misc]
    """``class AppTask(SafeTaskMixin, DjangoTask)`` with an ``apply_async`` of its own."""

    abstract = True


class MixinFirst(SafeTaskMixin, ActingTask):  # type: ignore[misc]
    """The base class is the project's."""

    abstract = True


class MixinLast(ActingTask, SafeTaskMixin):  # type: ignore[misc]
    """The project's class is in front of the mixin, and with it Celery's DjangoTask."""

    abstract = True


def note(value: int, by: Any = None) -> None:
    """Do nothing."""


def make_tasks(place: str, **options: Any) -> dict[str, Any]:
    """Return a task of each class, by the name of the class."""
    return {
        base.__name__: shared_task(base=base, name=f"{place}.{base.__name__}", **options)(note)
        for base in (OwnMethod, MixinFirst, MixinLast)
    }


TASKS = make_tasks("tests.sending.own")
BY_DEFAULT = make_tasks("tests.sending.own.by_default", send_on_commit=True)

#: Ways to send, given the name of a class.
WAYS: dict[str, Callable[[str], Any]] = {
    "delay": lambda name: TASKS[name].delay(1),
    "delay_on_commit": lambda name: TASKS[name].delay_on_commit(1),
    "delay, on commit by default": lambda name: BY_DEFAULT[name].delay(1),
    "outbox": lambda name: TASKS[name].apply_async_on_commit((1,), outbox=True),
    "signature": lambda name: send_on_commit(TASKS[name].s(1)),
    "chain": lambda name: send_on_commit(chain(TASKS[name].si(1), TASKS[name].si(2))),
}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("way", "name"), [*zip(WAYS, cycle(TASKS), strict=False)])
def test_each_send_goes_through_the_projects_apply_async(
    name: str, way: str, sent: Callable[[], list[Published]]
) -> None:
    """The message has what the project adds at the call, once, however the task is sent."""
    with transaction.atomic():
        token = acting.set("alice")
        WAYS[way](name)
        acting.reset(token)
    assert [one.body[:2] for one in sent()] == [[[1], {"by": ["alice"]}]]
