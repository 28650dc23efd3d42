"""The check of flags of do_once: which pages of the admin take them back."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib import admin
from django.forms import ModelForm

from django_celery_safe import SafeTask
from tests.app.models import Guest, Person
from tests.test_redelivery_checks import SURE, _no_faults, said
from tests.test_task_checks import MakeApp, make_app

__all__ = ["_no_faults", "make_app"]

pytestmark = pytest.mark.filterwarnings("ignore:Overriding setting DATABASES")


def welcome(pk: int) -> None:
    """Do a thing once by a flag."""
    with Person.do_once(pk, "is_welcome_email_sent") as person:
        if person:
            print("Welcome")


def reset(pk: int) -> None:
    """Name the flag, and do nothing once."""
    print(pk, "is_welcome_email_sent")


class FormWithoutFlag(ModelForm):  # type: ignore[type-arg] # not generic at run time
    """A form with one field."""

    class Meta:
        model = Person
        fields = ("email",)


class ByUser(admin.ModelAdmin):  # type: ignore[type-arg] # not generic at run time
    """What it shows depends on who asks."""

    def get_readonly_fields(self, request: Any, obj: Any = None) -> tuple[str, ...]:
        """Let superusers alone write the flag."""
        return () if request.user.is_superuser else ("is_welcome_email_sent",)


class OfItsOwn(admin.ModelAdmin):  # type: ignore[type-arg] # not generic at run time
    """It needs more of a request than a check has."""

    def get_fields(self, request: Any, obj: Any = None) -> list[str]:
        """Ask for what is not there."""
        return [str(request.tenant)]


@pytest.fixture
def show() -> Iterator[Callable[..., None]]:
    """Show a model in the admin during the test, by a class of pages with these attributes."""
    shown = []

    def register(model: Any, base: type = admin.ModelAdmin, **attributes: Any) -> None:
        admin.site.register(model, type("Page", (base,), attributes))
        shown.append(model)

    yield register
    for model in shown:
        admin.site.unregister(model)


PAGES: list[tuple[dict[str, Any], bool]] = [
    ({}, True),
    ({"fields": ["email", ("is_welcome_email_sent", "is_badge_printed")]}, True),
    ({"base": ByUser}, True),
    ({"readonly_fields": ["is_welcome_email_sent"]}, False),
    ({"exclude": ["is_welcome_email_sent"]}, False),
    ({"fieldsets": [(None, {"fields": ["email"]})]}, False),
    ({"form": FormWithoutFlag}, False),
    ({"base": OfItsOwn}, False),
]


@pytest.mark.parametrize(("page", "writes"), PAGES, ids=str)
def test_a_page_that_writes_the_flag(
    page: dict[str, Any], writes: bool, show: Callable[..., None], make_app: MakeApp
) -> None:
    """W023 names the page, the flag and the task, if the page's form has the flag."""
    app = make_app()
    app.task(welcome, name="shop.welcome", base=SafeTask, shared=False, **SURE)
    show(Person, **page)
    messages = said()
    assert bool(messages) is writes
    for number, text, hint in messages:
        assert number == "W023"
        assert "Page lets users edit app.Person.is_welcome_email_sent" in text
        assert "task shop.welcome" in text
        assert 'Add "is_welcome_email_sent" to its readonly_fields' in hint


def test_other_flags_and_models_are_no_matter(show: Callable[..., None], make_app: MakeApp) -> None:
    """Without a task that does something by it, a flag may be written; and so may any other."""
    app = make_app()
    app.task(reset, name="shop.reset", base=SafeTask, shared=False)
    show(Person)
    show(Guest)
    assert said() == []
