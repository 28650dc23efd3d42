"""The reference page lists what the admin has."""

from typing import Final

import pytest
from django.contrib import admin
from django.db.models import Model

from django_celery_safe.models import IdempotencyRecord, Lock, OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import every_page
from tests.admin.pages import Visitor
from tests.docs.pages import names_in, page

pytestmark = pytest.mark.repository

REFERENCE: Final = page("docs/reference/admin.md")
HEADINGS: Final[dict[type[Model], str]] = {
    Lock: "Locks",
    OutboxMessage: "Outbox messages",
    IdempotencyRecord: "Idempotency records",
    StageRun: "Runs of stages",
    StageStep: "Steps",
}


def test_permissions() -> None:
    """The page has the permissions of each model, those to see and those to act."""
    for model, see, act in REFERENCE.rows("Permissions"):
        (found,) = (each for each in HEADINGS if each.__name__ == names_in(model)[0])
        meta = found._meta
        assert names_in(see) == [f"{kind}_{meta.model_name}" for kind in meta.default_permissions]
        assert names_in(act) == [codename for codename, _ in meta.permissions]


def test_actions() -> None:
    """The page has every action, and says which have a box."""
    decisions = [each for model in HEADINGS for each in admin.site.get_model_admin(model).decisions]  # type: ignore[attr-defined]
    listed = {names_in(name)[0]: bool(box) for name, _, box in REFERENCE.rows("Actions")}
    assert listed == {each.name: bool(each.force) for each in decisions}


@pytest.mark.parametrize("model", HEADINGS, ids=HEADINGS.values())
def test_columns(root: Visitor, model: type[Model]) -> None:
    """The page has the columns of each list, in order."""
    rows.hold("feed")
    rows.leave()
    rows.record("k")
    rows.end(rows.begin(1), Status.FAILED)
    shown = root.get(every_page(model, 1)["list"]).columns
    listed = [names_in(cell)[0] for cell, _ in REFERENCE.rows(HEADINGS[model])]
    assert [each.lstrip("0123456789 ") for each in shown if each] == listed
