"""The page on the backend says what its code does."""

import pytest
from django.tasks import TaskResultStatus
from django.tasks.base import TASK_REFRESH_ATTRS

from django_celery_safe.backends import SafeCeleryBackend
from django_celery_safe.backends.backend import OPTIONS
from tests.docs.pages import names_in, page

PAGE = "docs/reference/django-tasks.md"

pytestmark = pytest.mark.repository


def test_options() -> None:
    """The page has every key of OPTIONS, in order, with its default."""
    rows = page(PAGE).rows("Options")
    assert {names_in(key)[0]: names_in(default)[0] for key, default, _ in rows} == {
        name: f'"{value}"' for name, value in OPTIONS.items()
    }


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Features", {name for name in dir(SafeCeleryBackend) if name.startswith("supports_")}),
        ("Signals", {"task_enqueued", "task_started", "task_finished"}),
    ],
)
def test_names(heading: str, names: set[str]) -> None:
    """The page has each flag of a backend, and each signal of Django's tasks."""
    assert {name for row in page(PAGE).rows(heading) for name in names_in(row[0])} == names


def test_results() -> None:
    """The page has each status, and all of a result that ``refresh`` reads again."""
    statuses = {names_in(row[0])[0] for row in page(PAGE).rows("Statuses")}
    assert statuses == set(TaskResultStatus.values)
    said = {name for row in page(PAGE).rows("Results") for name in names_in(row[0])}
    read = {name.removeprefix("_") for name in TASK_REFRESH_ATTRS} - {"status"}
    assert said == {*read, "attempts"}
