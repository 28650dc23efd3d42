"""The deaths in a task whose message the broker delivers again, without a worker."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import pytest
from billiard.exceptions import WorkerLostError
from celery.app.task import Context
from celery.worker import state
from pytest_django import Settings

from django_celery_safe import SafeTask, TaskPoisoned, idempotent, iter_locks, single_instance
from django_celery_safe.conf import UNSET
from django_celery_safe.delivery import deaths
from django_celery_safe.delivery.deaths import most_deaths, record_death
from django_celery_safe.delivery.header import HEADER
from django_celery_safe.leases.holder import HOST
from django_celery_safe.signals import task_poisoned
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox, Message, end_child
from tests.contract.conftest import use_store
from tests.processes import dead_port
from tests.sending.conftest import hearing

__all__ = ["mailbox", "use_store"]

NAME: Final = "tests.deadly"


class Deadly:
    """A task of the mailbox whose message is redelivered when its process has died."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        #: The number that each run was called with.
        self.runs: list[int] = []
        self.task = self.make_task()

    def make_task(self, decorate: Any = None, **options: Any) -> Any:
        """Make the task once more, with a decorator and more options, and return it."""

        def work(number: int) -> None:
            self.runs.append(number)

        options = {"base": SafeTask, "acks_late": True, "reject_on_worker_lost": True, **options}
        function = work if decorate is None else decorate(work)
        self.mailbox.app.tasks.pop(NAME, None)
        self.task = self.mailbox.task(function, name=NAME, **options)
        return self.task

    def send(self, number: int = 7) -> Message:
        """Return a message of the task."""
        self.task.delay(number)
        return self.mailbox.take_one()

    def die(self, message: Message, times: int = 1) -> None:
        """Record that processes died in the task."""
        for _ in range(times):
            record_death(self.task, Context(message.headers), os.getpid())


def redelivered(message: Message) -> Message:
    """Return a message as the broker delivers it again."""
    return replace(message, delivery_info={**message.delivery_info, "redelivered": True})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a count take its time: it connects to the store anew."""
    monkeypatch.setattr(deaths, "LONGEST_COUNT", 60.0)


@pytest.fixture
def deadly(mailbox: Mailbox, use_store: Callable[[str], None]) -> Deadly:
    """The task, with locks in memory."""
    use_store("local")
    return Deadly(mailbox)


def counted() -> set[str]:
    """Return the names of the deaths that were counted."""
    return {lock.name for lock in iter_locks()}


@pytest.mark.parametrize("store", ["django-redis", "memcached", "sqlite", "local"])
def test_it_is_not_run_again_after_three_deaths(
    store: str, deadly: Deadly, use_store: Callable[[str], None]
) -> None:
    """Each store counts the deaths of one message only; the error names the last process."""
    use_store(store)
    mailbox = deadly.mailbox
    message, other = deadly.send(), deadly.send(8)
    deadly.die(other)
    deadly.die(message, 2)
    assert mailbox.deliver(redelivered(message)).state == "SUCCESS"
    deadly.die(message)
    with hearing(task_poisoned) as heard:
        state, error = mailbox.deliver(redelivered(message))
    assert (state, type(error), error.deaths) == ("FAILURE", TaskPoisoned, 3)
    assert error.last == f"process {os.getpid()} on {HOST}"
    assert [(one["task"], one["task_id"]) for one in heard] == [(NAME, message.id)]
    assert mailbox.deliver(redelivered(other)).state == "SUCCESS"
    assert deadly.runs == [7, 8]


def test_no_more_deaths_are_counted_than_decide(deadly: Deadly) -> None:
    """Further deaths, of runs that could not ask the store, leave no further markers."""
    message = deadly.send()
    deadly.die(message, 5)
    assert counted() == {f"{NAME}:death:{message.id}:{number}" for number in (1, 2, 3)}
    deadly.task.max_deaths = 2
    _, error = deadly.mailbox.deliver(redelivered(message))
    assert error.deaths == 2


@pytest.mark.parametrize("error", [WorkerLostError("signal 9"), SystemExit(1)], ids=repr)
def test_a_child_that_dies_is_counted_before_its_message_is_put_back(
    error: BaseException, deadly: Deadly
) -> None:
    """Otherwise another worker could have the message before the death is counted."""
    request = deadly.mailbox.receive(deadly.send())
    when_rejected: list[set[str]] = []
    request._on_reject = lambda *_: when_rejected.append(counted())
    end_child(request, error)
    assert when_rejected == [{f"{NAME}:death:{request.id}:1"}]


@pytest.mark.parametrize("how", ["cancelled", "revoked", "terminated"])
def test_a_child_that_was_told_to_end_is_not_counted(
    how: str, deadly: Deadly, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that goes on after its task failed is not counted either."""
    request = deadly.mailbox.receive(deadly.send())
    end_child(request, ValueError("no"))
    if how == "terminated":
        monkeypatch.setattr(state, "should_terminate", True)
    else:
        monkeypatch.setattr(request, f"_already_{how}", True)
    end_child(request, WorkerLostError("signal 15"))
    assert counted() == set()


@pytest.mark.parametrize(
    ("options", "header"),
    [
        ({"max_deaths": None}, {}),
        ({"reject_on_worker_lost": False}, {}),
        ({}, {"attempt": "0" * 32}),
        ({}, {"step": 1}),
    ],
    ids=str,
)
def test_deaths_that_are_not_counted(
    options: dict[str, Any], header: dict[str, Any], deadly: Deadly
) -> None:
    """Tasks without redelivery or limit, and those whose rows count deaths, leave no markers."""
    deadly.make_task(**options)
    message = deadly.send()
    if header:
        message = message.with_headers(**{HEADER: {"task": NAME, **header}})
    deadly.die(message)
    assert counted() == set()


def test_a_store_that_does_not_answer(
    deadly: Deadly, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    """The task runs, since its deaths are not known; only a redelivered message asks, and warns."""
    message = deadly.send()
    deadly.die(message, 3)
    assert deadly.mailbox.deliver(message).state == "SUCCESS"
    redis = "django.core.cache.backends.redis.RedisCache"
    address = f"redis://127.0.0.1:{dead_port()}"
    settings.CACHES = {"default": {"BACKEND": redis, "LOCATION": address}}
    assert deadly.mailbox.deliver(message).state == "SUCCESS"
    assert caplog.records == []
    deadly.die(message)
    assert "The death of a process could not be counted" in caplog.text
    assert deadly.mailbox.deliver(redelivered(message)).state == "SUCCESS"
    assert f"{message.id}] can't be asked, so it runs" in caplog.text
    assert {one.levelno for one in caplog.records} == {logging.WARNING}


@pytest.mark.usefixtures("db")
def test_work_of_a_poisoned_task_is_not_done(deadly: Deadly) -> None:
    """The message is not retried and claims nothing of @idempotent: another one does the work."""
    deadly.make_task(idempotent("{number}"), autoretry_for=(Exception,))
    message = deadly.send()
    deadly.die(message, 3)
    assert deadly.mailbox.deliver(redelivered(message)).state == "FAILURE"
    assert deadly.mailbox.take() == []
    assert deadly.mailbox.deliver(deadly.send()).state == "SUCCESS"
    assert deadly.runs == [7]


def test_a_poisoned_task_may_be_sent_again(deadly: Deadly) -> None:
    """The lock of its message is freed, as for any failure."""
    task = deadly.make_task(single_instance(key="{number}", unique_until="end"))
    message = deadly.send()
    assert task.delay(7).is_duplicate
    deadly.die(message, 3)
    assert deadly.mailbox.deliver(redelivered(message)).state == "FAILURE"
    assert not task.delay(7).is_duplicate
    assert deadly.mailbox.deliver(deadly.mailbox.take_one()).state == "SUCCESS"
    assert deadly.runs == [7]


@pytest.mark.parametrize(("given", "setting", "most"), [(UNSET, 5, 5), (2, 5, 2), (None, 5, None)])
def test_the_task_says_how_many_may_die(
    given: Any, setting: int, most: int | None, deadly: Deadly, settings: Settings
) -> None:
    """A task without ``max_deaths`` uses the setting."""
    settings.DJANGO_CELERY_SAFE = {"MAX_DEATHS": setting}
    assert most_deaths(deadly.make_task(max_deaths=given)) == most
