"""Each decision of the admin, with a row that it fits."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from django.db.models import Model

from django_celery_safe import find_lock
from django_celery_safe.models import IdempotencyRecord, Lock, OutboxMessage, StageRun
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import every_page
from tests.admin.pages import Visitor


class Case(NamedTuple):
    """A decision, and a row that it fits."""

    decision: str
    model: type[Model]
    #: Makes the row; returns its primary key, and what stands for it in forms.
    make: Callable[[], tuple[Any, str]]
    #: Returns what is to change, and only by the decision.
    state: Callable[[Any], object]

    @property
    def permission(self) -> str:
        """The codename of the decision's own permission."""
        return f"{self.decision}_{self.model._meta.model_name}"


def make_lock() -> tuple[str, str]:
    """Have somebody hold a lock that is not renewed."""
    token = rows.hold("feed", rows.HOLDER._replace(renewed=False))
    return "feed", f'{token}"feed"'


def token_of(name: str) -> str | None:
    """Return which acquisition holds a lock."""
    held = find_lock(name)
    return None if held is None else held.token


def make_row(row: Model) -> tuple[Any, str]:
    """Return what stands for a row."""
    return row.pk, str(row.pk)


def state_of(model: Any, *columns: str) -> Callable[[Any], object]:
    """Return what reads these columns of a row."""
    return lambda pk: model.objects.filter(pk=pk).values_list(*columns).first()


CASES: Final = [
    Case("release", Lock, make_lock, token_of),
    Case("retry", OutboxMessage, lambda: make_row(rows.leave_dead()),
         state_of(OutboxMessage, "due_at", "dead_at", "attempts")),
    Case("discard", OutboxMessage, lambda: make_row(rows.leave_dead()),
         state_of(OutboxMessage, "pk")),
    Case("forget", IdempotencyRecord, lambda: make_row(rows.record("paid:7")),
         state_of(IdempotencyRecord, "state")),
    Case("resume", StageRun, lambda: make_row(rows.end(rows.begin(1), Status.FAILED)),
         state_of(StageRun, "status")),
    Case("abort", StageRun, lambda: make_row(rows.begin(1)), state_of(StageRun, "status")),
]  # fmt: skip


def take_each(visitor: Visitor) -> None:
    """Make a row for each decision, open all pages about it, and take the decision."""
    for case in CASES:
        pk, selection = case.make()
        pages = every_page(case.model, pk)
        assert all(visitor.get(url).status == 200 for url in pages.values())
        asked = visitor.take(pages["list"], case.decision, selection)
        assert asked.decisions == [case.decision], (asked.status, asked.text)
        (told,) = visitor.confirm(pages["list"], case.decision, selection).messages
        assert told.startswith("1 ")
