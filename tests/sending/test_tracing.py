"""Tracing: values that receivers of Celery's publish signals set last for one publication."""

from collections.abc import Callable, Iterator

import pytest
from celery import group, shared_task
from django.db import transaction
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from django_celery_safe import SafeTask, send_on_commit, single_instance
from tests.app.tasks import add
from tests.sending.published import Published

pytestmark = pytest.mark.django_db(transaction=True)

Sent = Callable[[], list[Published]]


@shared_task(base=SafeTask)
@single_instance(key="{number}", unique_until="end")
def unique(number: int) -> None:
    """Be sent once until it ends."""


class Spans:
    """Spans that have ended, and a tracer for the tests' own."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("tests")

    def take(self) -> list[ReadableSpan]:
        """Return the spans that ended since the last call, in that order."""
        ended = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        return ended


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Trace Celery, as opentelemetry-instrumentation-celery does, during the test."""
    found = Spans()
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=found.provider)
    yield found
    instrumentor.uninstrument()


def parent_of(span: ReadableSpan) -> int | None:
    """Return the id of a span's parent."""
    return None if span.parent is None else span.parent.span_id


@pytest.mark.parametrize("outbox", [True, False])
def test_the_span_of_a_send_is_not_current_after_the_call(
    outbox: bool, spans: Spans, sent: Sent
) -> None:
    """The span lasts for the publication only, as a child of the caller's span."""
    outside = trace.get_current_span()
    with spans.tracer.start_as_current_span("request") as request:
        with transaction.atomic():
            result = add.apply_async_on_commit((1,), outbox=outbox)
            assert trace.get_current_span() is request
            send_on_commit(group(add.s(2), add.s(3)), outbox=outbox)
            assert trace.get_current_span() is request
            assert spans.take() == []
        assert trace.get_current_span() is request
        ended = spans.take()
    assert trace.get_current_span() is outside
    assert [span.name for span in ended] == [f"apply_async/{add.name}"] * 3
    request_id = request.get_span_context().span_id
    assert {parent_of(span) for span in ended} == {request_id}
    first = next(message for message in sent() if message.id == result.id)
    assert format(ended[0].get_span_context().span_id, "016x") in first.headers["traceparent"]


@pytest.mark.usefixtures("locks_in_memory")
def test_what_is_not_published_leaves_no_span_behind(spans: Spans, sent: Sent) -> None:
    """Code after a rollback, or after a duplicate, does not run in the span of the send."""
    outside = trace.get_current_span()
    for outbox in (True, False):
        with transaction.atomic():
            add.apply_async_on_commit((1,), outbox=outbox)
            transaction.set_rollback(True)
    assert trace.get_current_span() is outside
    assert (spans.take(), sent()) == ([], [])
    unique.delay(1)
    assert unique.delay(1).is_duplicate is True
    assert trace.get_current_span() is outside
    assert len(sent()) == len(spans.take()) == 1
