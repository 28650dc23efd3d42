"""The check of the flags of ``do_once``: pages of the admin that take them back."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from celery import current_app
from django.apps import apps
from django.core.checks import CheckMessage
from django.http import HttpRequest

from ..concurrency.call import layers
from ..idempotency import IdempotentMixin
from ..idempotency.flags import flag_names
from .messages import warning
from .tasks import load_tasks

#: A user who may do everything, for forms that ask.
_ANYBODY: Final = SimpleNamespace(
    pk=None, is_active=True, is_staff=True, is_superuser=True, has_perm=lambda *args: True
)


def check_flags() -> list[CheckMessage]:
    """W023: a form of the admin saves a flag as it was when its page was opened."""
    if not apps.is_installed("django.contrib.admin"):
        return []
    from django.contrib.admin.sites import all_sites  # it needs to be installed

    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    try:
        tasks = load_tasks(app)
    except Exception:  # noqa: BLE001 - W007 says so
        return []
    named = {text: task.name for task in tasks for text in _texts_of_do_once(task)}
    return [
        warning(
            23,
            f"{type(page).__name__} lets the admin write {model._meta.label}.{flag}, by which "
            f"task {named[flag]} does something once: whoever saves a page that was opened "
            f"before the task ran takes the flag back, and it is done again.",
            f'Add "{flag}" to its readonly_fields, or set editable=False on the field.',
        )
        for site in all_sites
        for model, page in site._registry.items()
        if issubclass(model, IdempotentMixin)
        for flag in flag_names(model)
        if flag in named and _writes(page, flag)
    ]


def _texts_of_do_once(task: Any) -> Iterator[str]:
    """Yield the texts in the code of a task's own function, if that names ``do_once``."""
    *_, innermost = layers(task.run)
    code = getattr(innermost, "__code__", None)
    if code is not None and "do_once" in code.co_names:
        yield from (text for text in code.co_consts if isinstance(text, str))


def _writes(page: Any, flag: str) -> bool:
    """Tell whether the form of a page of the admin has a field for the flag."""
    request: Any = HttpRequest()
    request.user = _ANYBODY
    try:
        return flag in page.get_form(request, page.model(), change=True).base_fields
    except Exception:  # noqa: BLE001 - the project's own code, which may need a real request
        return False
