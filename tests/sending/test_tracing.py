"""
Tracers: a message keeps its trace, whichever way it takes, and each flow ends as it does alone.

OpenTelemetry and Sentry are the real ones. Beside Sentry are a tracer that adds a header named
``headers`` (as ddtrace and Celery's old way to pass headers do), and a proxy that Celery's tracer
gets in place of the task (as from New Relic's agent).
"""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

import pytest
import sentry_sdk
import wrapt
from celery import Task, chain, group
from celery.app import trace as tracing
from celery.signals import before_task_publish
from django.db import connections, transaction
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_current_span
from sentry_sdk.integrations.celery import CeleryIntegration

from django_celery_safe import SafeTask, send_on_commit, single_instance, stages
from django_celery_safe.databases import Now
from django_celery_safe.models import OutboxMessage, StageRun
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


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Trace Celery by OpenTelemetry; gives the spans that have ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    yield exporter
    instrumentor.uninstrument()


@pytest.fixture(params=["opentelemetry", "sentry"])
def tracer(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Trace Celery by each integration in turn."""
    if request.param == "opentelemetry":
        request.getfixturevalue("spans")
        yield OpenTelemetry(TracerProvider().get_tracer("tests"))
    else:
        with tracing_by_sentry(), inner_headers(), proxies():
            yield Sentry()


@pytest.fixture
def alias(make_database: MakeDatabase) -> Iterator[str]:
    """The database of outbox and stages."""
    name = make_database("sqlite-immediate", "shop")
    with routed_by(AllIn(name)):
        yield name


def nothing(number: int = 0) -> None:
    """Do nothing."""


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


def test_a_carried_message(tracer: Any, alias: str, mailbox: Mailbox) -> None:
    """One that no worker began keeps its trace, as a retry does, and its row ends with its run."""

    def retry_once(self: Any, tenant: str = "") -> str:
        if not tenant:
            raise self.retry(args=(self.request.headers["tenant"],), countdown=0)
        return tenant

    task = mailbox.task(
        retry_once, name="tests.traced", base=SafeTask, bind=True, outbox="until_done"
    )
    with tracer.request() as trace:
        task.apply_async(using=alias, headers={"headers": {"tenant": "a"}})
    first = mailbox.take_one()
    relay(alias)
    again = mailbox.take_one()
    assert again.id == first.id
    assert mailbox.deliver(again).state == "RETRY"
    last = mailbox.take_one()
    assert {tracer.trace_of(each.headers) for each in (first, again, last)} == {trace}
    assert mailbox.deliver(last) == ("SUCCESS", "a")
    assert not OutboxMessage.objects.exists()


def test_steps(tracer: Any, alias: str, mailbox: Mailbox) -> None:
    """The first stage has the trace of the start, and a later one that of the step before it."""
    task = mailbox.task(stages.step(step), name="tests.traced_step", base=SafeTask)
    with tracer.request() as trace, transaction.atomic(using=alias):
        stages.start([(task, 2), (task, 2), (task, 1)])
        let_the_sender_die(alias)
    relay(alias)
    first = mailbox.take()
    assert [mailbox.deliver(message).state for message in first] == ["SUCCESS"] * 2
    messages = [*first, mailbox.take_one()]
    assert {tracer.trace_of(each.headers) for each in messages} == {trace}
    assert mailbox.deliver(messages[-1]).state == "SUCCESS"
    assert StageRun.objects.get().status == "succeeded"


@pytest.mark.usefixtures("locks_in_memory")
def test_a_copy(tracer: Any, mailbox: Mailbox) -> None:
    """The copy of a message that met its own lock has the trace of the message."""
    alone = single_instance(key="{number}")(nothing)
    task = mailbox.task(alone, name="tests.traced", base=SafeTask, acks_late=True)
    with tracer.request() as trace:
        task.delay(7)
    message = mailbox.take_one()
    with held_by(f"{task.name}:7", message.id):
        assert mailbox.deliver(message).state == "IGNORED"
    copy = mailbox.take_one()
    assert (copy.id, tracer.trace_of(copy.headers)) == (message.id, trace)


@pytest.mark.parametrize("outbox", [True, False])
def test_the_span_of_a_send_is_not_current_after_the_call(
    outbox: bool, spans: InMemorySpanExporter, alias: str, mailbox: Mailbox
) -> None:
    """The span lasts for the publication only, as a child of the caller's span."""
    task = mailbox.task(nothing, name="tests.traced", base=SafeTask)
    outside = get_current_span()
    with TracerProvider().get_tracer("tests").start_as_current_span("request") as request:
        with transaction.atomic(using=alias):
            task.apply_async_on_commit(using=alias, outbox=outbox)
            assert get_current_span() is request
            send_on_commit(group(task.s(), task.s()), using=alias, outbox=outbox)
            assert get_current_span() is request
            assert spans.get_finished_spans() == ()
        assert get_current_span() is request
    assert get_current_span() is outside
    ended = spans.get_finished_spans()
    assert [span.name for span in ended] == ["apply_async/tests.traced"] * 3
    request_id = request.get_span_context().span_id
    assert {span.parent and span.parent.span_id for span in ended} == {request_id}
    first, *_ = mailbox.take()
    assert format(ended[0].get_span_context().span_id, "016x") in first.headers["traceparent"]
