"""Admin pages that can reset a flag of ``do_once``."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final

from django.apps import apps
from django.core.checks import CheckMessage
from django.http import HttpRequest

from ..idempotency import IdempotentMixin
from ..idempotency.flags import flag_names
from ..inspection.findings import fault
from .project import Project, innermost_code

#: A user with all permissions, for forms that check them.
_ANYBODY: Final = SimpleNamespace(
    pk=None, is_active=True, is_staff=True, is_superuser=True, has_perm=lambda *args: True
)


def find_flag_faults(project: Project) -> Iterator[CheckMessage]:
    """W023: an admin form saves a flag with the value from when its page was opened."""
    if not apps.is_installed("django.contrib.admin"):
        return
    from django.contrib.admin.sites import all_sites  # works only if the admin is installed

    tasks = {text: task.name for task in project.tasks for text in _texts_of_do_once(task)}
    for model, page in (item for site in all_sites for item in site._registry.items()):
        for flag in flag_names(model) if issubclass(model, IdempotentMixin) else ():
            if flag in tasks and _writes(page, flag):
                yield fault(
                    "W023",
                    f"{type(page).__name__} lets users edit {model._meta.label}.{flag}, the flag "
                    f"by which task {tasks[flag]} does its work only once: saving a page that was "
                    f"opened before the task ran resets the flag, and the work is done again.",
                    f'Add "{flag}" to its readonly_fields, or set editable=False on the field.',
                )


def _texts_of_do_once(task: Any) -> Iterator[str]:
    """Yield the texts in the code of a task's own function, if the code names ``do_once``."""
    code = innermost_code(task)
    if code is not None and "do_once" in code.co_names:
        yield from (text for text in code.co_consts if isinstance(text, str))


def _writes(page: Any, flag: str) -> bool:
    """Return whether the form of an admin page has a field for the flag."""
    request: Any = HttpRequest()
    request.user = _ANYBODY
    try:
        return flag in page.get_form(request, page.model(), change=True).base_fields
    except Exception:  # noqa: BLE001 - the project's own code, which may need a real request
        return False
