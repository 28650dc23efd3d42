"""Each decision of the admin, with a row that it fits."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from django_celery_safe import find_lock
from django_celery_safe.models import IdempotencyRecord, Lock, OutboxMessage, StageRun
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.pages import Visitor, every_page
from tests.admin.urls import LOCKS, OUTBOX, RECORDS, RUNS


class Case(NamedTuple):
    """
    A decision, and a row that it fits.

    Attributes:
        done: The beginning of the page's message.
        make: Makes the row; returns its primary key.
        column: The column that the decision changes.
        asks: Whether there is a confirmation page first.
    """

    decision: str
    done: str
    model: Any
    url: str
    make: Callable[[], Any]
    column: str
    asks: bool = True

    def state(self, pk: Any) -> object:
        """Return what is to change, and only by the decision."""
        if self.model is Lock:
            return (held := find_lock(pk)) and held.token
        return self.model.objects.filter(pk=pk).values_list(self.column).first()


CASES: Final = [
    Case("release", "Released", Lock, LOCKS, lambda: rows.hold("feed") and "feed", "token"),
    Case("retry", "Made due", OutboxMessage, OUTBOX, lambda: rows.leave_dead().pk, "state",
         asks=False),
    Case("discard", "Discarded", OutboxMessage, OUTBOX, lambda: rows.leave_dead().pk, "pk"),
    Case("forget", "Forgotten", IdempotencyRecord, RECORDS, lambda: rows.record("paid:7").pk, "pk"),
    Case("resume", "Resumed", StageRun, RUNS,
         lambda: rows.end(rows.begin(1), Status.FAILED).pk, "status", asks=False),
    Case("abort", "Aborted", StageRun, RUNS, lambda: rows.begin(1).pk, "status"),
]  # fmt: skip


def take_each(visitor: Visitor) -> None:
    """Make a row for each decision, open all pages about it, and take the decision."""
    for case in CASES:
        pk = case.make()
        assert all(visitor.get(url).status == 200 for url in every_page(case.model, pk).values())
        if case.asks:
            assert visitor.take(case.url, case.decision, pk).decisions == [case.decision]
        (told,) = visitor.confirm(case.url, case.decision, pk).messages
        assert told.startswith(f"{case.done}: 1 ")
