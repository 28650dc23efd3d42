"""
Trace headers of OpenTelemetry and Sentry stay with a message, whichever way it takes.

Each integration is the real one. The message is read at the broker, in a table, or by the task
that it runs; its trace has to be that of the code which sent it.
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import pytest
import sentry_sdk
from celery import chain, group
from django.db import connections, transaction
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from sentry_sdk.integrations.celery import CeleryIntegration

from django_celery_safe import SafeTask, send_on_commit, single_instance, stages
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage
from django_celery_safe.sending.relay import Relay
from tests.concurrency.conftest import mailbox
from tests.concurrency.holders import held_by
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.routing import AllIn, routed_by

__all__ = ["mailbox"]


class OpenTelemetry(NamedTuple):
    """opentelemetry-instrumentation-celery."""

    tracer: Any

    @contextmanager
    def request(self) -> Iterator[str]:
        """Be in a span of its own."""
        with self.tracer.start_as_current_span("request") as span:
            yield format(span.get_span_context().trace_id, "032x")

    def trace_of(self, headers: dict[str, Any]) -> str:
        """Read the header of W3C."""
        return str(headers.get("traceparent", "--")).split("-")[1]


class Sentry:
    """Sentry's integration, which wraps ``apply_async`` of all tasks."""

    @contextmanager
    def request(self) -> Iterator[str]:
        """Be in a transaction of its own."""
        with (
            sentry_sdk.isolation_scope(),
            sentry_sdk.start_transaction(name="request", op="http.server") as span,
        ):
            yield span.trace_id

    def trace_of(self, headers: dict[str, Any]) -> str:
        """Read Sentry's own header."""
        return str(headers.get("sentry-trace", "-")).split("-")[0]


@contextmanager
def tracing_by_sentry() -> Iterator[None]:
    """Trace Celery by Sentry. No message leaves this process: each is dropped."""
    sentry_sdk.init(
        dsn="http://key@127.0.0.1:1/1",
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration()],
        default_integrations=False,
        auto_enabling_integrations=False,
        before_send=lambda event, hint: None,
        before_send_transaction=lambda event, hint: None,
    )
    yield
    sentry_sdk.get_client().close(timeout=0)
    sentry_sdk.init(default_integrations=False, auto_enabling_integrations=False)


@pytest.fixture(params=["opentelemetry", "sentry"])
def tracer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Trace Celery by each integration in turn."""
    if request.param == "opentelemetry":
        provider = TracerProvider()
        instrumentor = CeleryInstrumentor()
        instrumentor.instrument(tracer_provider=provider)
        yield OpenTelemetry(provider.get_tracer("tests"))
        instrumentor.uninstrument()
        return
    with tracing_by_sentry():
        yield Sentry()


@pytest.fixture
def alias(make_database: MakeDatabase) -> Iterator[str]:
    """The database of outbox and stages."""
    name = make_database("sqlite-immediate", "shop")
    with routed_by(AllIn(name)):
        yield name


def nothing() -> None:
    """Do nothing."""


def work_on(number: int) -> None:
    """Do nothing, under the lock of a number."""


def step(params: dict[str, Any]) -> None:
    """Do nothing, as a step."""


def relay(alias: str) -> None:
    """Send what is due, as a relay does, outside every trace."""
    OutboxMessage.objects.filter(due_at__isnull=False).update(due_at=Now())
    with closing(Relay(alias)) as relaying:
        while relaying.relay_batch():
            pass


def let_the_sender_die(alias: str) -> None:
    """Forget what is to happen after the commit."""
    connections[alias].run_on_commit.clear()


@pytest.mark.parametrize(("outbox", "dies"), [(None, False), (True, True), ("until_done", False)])
def test_sends(tracer: Any, alias: str, mailbox: Mailbox, outbox: Any, dies: bool) -> None:
    """A message has the trace of its call, published right after the commit or by a relay."""
    task = mailbox.task(nothing, name="tests.traced", base=SafeTask)
    with tracer.request() as trace, transaction.atomic(using=alias):
        task.apply_async_on_commit(using=alias, outbox=outbox, headers={"mine": "1"})
        send_on_commit(group(task.si(), task.si()), using=alias, outbox=outbox)
        send_on_commit(chain(task.si(), task.si()), using=alias, outbox=outbox)
        if dies:
            let_the_sender_die(alias)
    if dies:
        assert mailbox.take() == []
        with tracer.request() as other:
            relay(alias)
        assert other != trace
    first, *messages = mailbox.take()
    assert first.headers["mine"] == "1"
    for message in messages:
        mailbox.deliver(message)
    following = mailbox.take_one()  # the next of the chain belongs to the run before it
    assert [tracer.trace_of(each.headers) for each in (first, *messages, following)] == [trace] * 5


def test_a_message_that_is_sent_again(tracer: Any, alias: str, mailbox: Mailbox) -> None:
    """A carried task that no worker began keeps its trace, and so does a retry."""

    def try_again(self: Any) -> None:
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = mailbox.task(
        try_again, name="tests.traced", base=SafeTask, bind=True, outbox="until_done"
    )
    with tracer.request() as trace:
        task.apply_async_on_commit(using=alias)
    first = mailbox.take_one()
    relay(alias)
    again = mailbox.take_one()
    assert again.id == first.id
    mailbox.deliver(again)
    messages = [first, again, mailbox.take_one()]
    assert {tracer.trace_of(each.headers) for each in messages} == {trace}


@pytest.mark.usefixtures("locks_in_memory")
def test_a_copy(tracer: Any, mailbox: Mailbox) -> None:
    """The copy of a message that met its own lock has the trace of the message."""
    task = mailbox.task(
        single_instance(key="{number}")(work_on), name="tests.traced", base=SafeTask, acks_late=True
    )
    with tracer.request() as trace:
        task.delay(7)
    message = mailbox.take_one()
    with held_by(f"{task.name}:7", message.id):
        assert mailbox.deliver(message).state == "IGNORED"
    copy = mailbox.take_one()
    assert copy.id == message.id
    assert tracer.trace_of(copy.headers) == trace


def test_steps(tracer: Any, alias: str, mailbox: Mailbox) -> None:
    """The first stage has the trace of the start, and a later one that of the step before it."""
    task = mailbox.task(stages.step(step), name="tests.traced_step", base=SafeTask)
    with tracer.request() as trace, transaction.atomic(using=alias):
        stages.start([(task, 2), (task, 2), (task, 1)])
        let_the_sender_die(alias)
    relay(alias)
    first = mailbox.take()
    assert [mailbox.deliver(message).state for message in first] == ["SUCCESS"] * 2
    relay(alias)
    messages = [*first, mailbox.take_one()]
    assert {tracer.trace_of(each.headers) for each in messages} == {trace}
