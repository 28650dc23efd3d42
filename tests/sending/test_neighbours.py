"""
What stands between Celery and a message: tracers that add headers, and proxies that run the task.

Each flow ends as it does alone. The company is the real Sentry, a tracer that adds a header named
``headers`` (as ddtrace and Celery's old way to pass headers do), and a proxy that Celery's tracer
gets in place of the task (as from New Relic's agent).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import wrapt
from celery import Task
from celery.app import trace as tracing
from celery.signals import before_task_publish

from django_celery_safe import SafeTask, iter_locks, single_instance, stages
from django_celery_safe.models import OutboxMessage, StageRun
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.routing import AllIn, routed_by
from tests.sending.test_trace_headers import tracing_by_sentry

__all__ = ["mailbox"]


class Proxy(wrapt.ObjectProxy[Any]):
    """A task that is called in place of its run, so that the call can be timed."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task."""
        return self.__wrapped__(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task; Celery's tracer calls this if the class has no call of its own."""
        return self(*args, **kwargs)


@contextmanager
def proxies() -> Iterator[None]:
    """Have each task traced by a proxy."""
    build = tracing.build_tracer

    def build_tracer(name: str, task: Any, *args: Any, **kwargs: Any) -> Any:
        return build(name, Proxy(task), *args, **kwargs)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "build_tracer", build_tracer)
        # As in a worker, where a call of the task by its tracer is the run of its message.
        patch.setattr(Task, "__call__", call)
        yield


@contextmanager
def inner_headers() -> Iterator[None]:
    """Add the header ``headers`` to each message that is published."""

    def add(headers: dict[str, Any], **_: Any) -> None:
        headers.setdefault("headers", {})["x-trace"] = "1"

    before_task_publish.connect(add, weak=False)
    try:
        yield
    finally:
        before_task_publish.disconnect(add)


COMPANY: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "sentry": tracing_by_sentry,
    "inner headers": inner_headers,
    "proxy": proxies,
}


@pytest.fixture(params=COMPANY, autouse=True)
def _company(request: pytest.FixtureRequest) -> Iterator[None]:
    """Be in each company in turn."""
    with COMPANY[request.param]():
        yield


@pytest.fixture
def alias(make_database: MakeDatabase) -> Iterator[str]:
    """The database of outbox and stages."""
    name = make_database("sqlite-immediate", "shop")
    with routed_by(AllIn(name)):
        yield name


def test_a_carried_task_runs_once(alias: str, mailbox: Mailbox) -> None:
    """Its row ends with its last run, and the headers that its caller passed arrive."""

    def retry_once(self: Any, tenant: str = "") -> str:
        if not tenant:
            raise self.retry(args=(self.request.headers["tenant"],), countdown=0)
        return tenant

    task = mailbox.task(
        retry_once, name="tests.carried", base=SafeTask, bind=True, outbox="until_done"
    )
    task.apply_async(using=alias, headers={"headers": {"tenant": "a"}})
    assert mailbox.deliver(mailbox.take_one()).state == "RETRY"
    assert OutboxMessage.objects.count() == 1
    message = mailbox.take_one()
    assert mailbox.deliver(message) == ("SUCCESS", "a")
    assert not OutboxMessage.objects.exists()
    assert mailbox.deliver(message).state == "IGNORED"


def test_stages(alias: str, mailbox: Mailbox) -> None:
    """Each step is recorded, one after a retry, and the next stage begins."""

    def work(self: Any, params: dict[str, Any]) -> dict[str, Any]:
        if not self.request.retries:
            raise self.retry(countdown=0)
        return {"done": params.get("done", 0) + 1}

    plain = mailbox.task(stages.step(work), name="tests.plain_step", bind=True)
    safe = mailbox.task(stages.step(work), name="tests.step", bind=True, base=SafeTask)
    run = stages.start([(plain, 2), (safe, 1)])
    for _ in range(2):
        assert mailbox.deliver(mailbox.take_one()).state == "RETRY"
        assert mailbox.deliver(mailbox.take_one()).state == "SUCCESS"
    run = StageRun.objects.get()
    assert (run.status, run.params, mailbox.take()) == ("succeeded", {"done": 2}, [])


def locked() -> list[str]:
    """Return the names of the locks that are held."""
    return [lock.name for lock in iter_locks()]


@pytest.mark.usefixtures("locks_in_memory")
def test_a_unique_send_may_be_repeated_after_its_run(mailbox: Mailbox) -> None:
    """The lock of the send is held during the run, a retry included, and free after it."""

    def try_again(self: Any, number: int) -> list[str]:
        if not self.request.retries:
            raise self.retry(countdown=0)
        return locked()

    unique = single_instance(key="{number}", unique_until="end")(try_again)
    task = mailbox.task(unique, name="tests.unique", base=SafeTask, bind=True)
    first = task.delay(7)
    assert task.delay(7).id == first.id
    assert mailbox.deliver(mailbox.take_one()).state == "RETRY"
    assert task.delay(7).is_duplicate
    held = mailbox.deliver(mailbox.take_one()).value
    assert sorted(held) == ["sent:tests.unique:7", "tests.unique:7"]
    assert locked() == []
    assert not task.delay(7).is_duplicate
