"""The backend of Django's tasks is never in the way."""

import django
import pytest

from tests.commands import run_python

#: Prints which modules that only the backend needs were imported.
IMPORTED = """
import sys, django, celery
import django_celery_safe
django.setup()
from django_celery_safe import apps, checks, tasks
print([name for name in sys.modules if name.startswith("django_celery_safe.backends")])
"""

#: Defines a task, then the project's app; prints what was there before, and what is afterwards.
DEFINED = """
import threading
import django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django_celery_safe"],
    TASKS={"default": {"BACKEND": "django_celery_safe.backends.SafeCeleryBackend"}},
)
django.setup()
from tests.tasks_backend import work
work.add.using(run_after=None)
from celery import Celery, _state, current_app
before = _state.default_app
app = Celery("shop")
found = []
thread = threading.Thread(target=lambda: found.append(current_app._get_current_object() is app))
thread.start()
thread.join()
print(before, *found)
"""


def test_nothing_imports_the_backend() -> None:
    """Only Django does, for a project whose TASKS names it."""
    environment = {"DJANGO_SETTINGS_MODULE": "tests.settings", "PATH": ""}
    assert run_python("-c", IMPORTED, env=environment) == "[]\n"


@pytest.mark.skipif(django.VERSION < (6, 0), reason="Django 5.2 has no tasks.")
def test_a_task_makes_no_celery_app() -> None:
    """One that is defined before the project's app must not become that of other threads."""
    assert run_python("-c", DEFINED) == "None True\n"
