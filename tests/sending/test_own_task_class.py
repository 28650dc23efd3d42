"""A project's own task class, whose ``apply_async`` adds to what each send carries."""

from collections.abc import Callable
from contextvars import ContextVar
from itertools import cycle
from typing import Any

import pytest
from celery import chain, shared_task
from celery.contrib.django.task import DjangoTask
from django.db import transaction

from django_celery_safe import SafeTaskMixin, send_on_commit
from tests.sending.published import Published

pytestmark = pytest.mark.django_db(transaction=True)

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


TASKS = {
    base.__name__: shared_task(base=base, name=f"tests.sending.own.{base.__name__}")(note)
    for base in (OwnMethod, MixinFirst, MixinLast)
}
BY_DEFAULT = {
    base.__name__: shared_task(
        base=base, name=f"tests.sending.own.{base.__name__}_by_default", send_on_commit=True
    )(note)
    for base in (OwnMethod, MixinFirst, MixinLast)
}

#: Ways to send, given the name of a class.
WAYS: dict[str, Callable[[str], Any]] = {
    "delay": lambda name: TASKS[name].delay(1),
    "delay_on_commit": lambda name: TASKS[name].delay_on_commit(1),
    "delay, on commit by default": lambda name: BY_DEFAULT[name].delay(1),
    "outbox": lambda name: TASKS[name].apply_async_on_commit((1,), outbox=True),
    "signature": lambda name: send_on_commit(TASKS[name].s(1)),
    "chain": lambda name: send_on_commit(chain(TASKS[name].si(1), TASKS[name].si(2))),
}


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
