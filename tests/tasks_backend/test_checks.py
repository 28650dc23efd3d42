"""The system checks of the backend, and the checks of tasks, which look at those of Django too."""

from typing import Any

import pytest
from celery import Celery
from django.core import checks
from django.test import modify_settings, override_settings
from kombu import Queue

from tests import checking
from tests.checking import app
from tests.tasks_backend.scenes import BACKEND, tasks_setting

__all__ = ["app"]

pytestmark = pytest.mark.usefixtures("app")

KEEPING = {"OUTBOX_RETENTION": 60}


class Nowhere:
    """A database router that allows no outbox."""

    def allow_migrate(self, db: str, app_label: str, **hints: Any) -> bool | None:
        """Return False for the tables of the package."""
        return False if app_label == "django_celery_safe" else None


def find_messages(**settings: Any) -> list[checks.CheckMessage]:
    """Return what the check of Django's backends finds, as the command shows it."""
    with override_settings(**settings):
        said = checks.run_checks()
    ours = [one for one in said if str(one.id).startswith(checking.PREFIX)]
    return [one for one in ours if one.msg.startswith("TASKS[")]


def ids(messages: list[checks.CheckMessage]) -> list[str]:
    """Return the ids of messages, each of which has a hint and fits into two lines."""
    for one in messages:
        assert one.hint
        assert len(one.msg) <= checking.TWO_LINES, one.msg
    return [str(one.id).removeprefix(f"{checking.PREFIX}.") for one in messages]


def test_w027_results_are_not_kept() -> None:
    """Unless nobody expects results, since tasks are not carried."""
    found = find_messages(TASKS=tasks_setting("default"))
    assert ids(found) == ["W027"]
    assert 'TASKS["default"] forgets a task when it is done' in found[0].msg
    assert find_messages(TASKS=tasks_setting("default", outbox=True)) == []
    wrong = {"OUTBOX_RETENTION": "a day"}
    assert find_messages(TASKS=tasks_setting("default"), DJANGO_CELERY_SAFE=wrong) == []


def test_e012_the_app_is_not_installed() -> None:
    """Then no other check of ours would be there to say it."""
    with modify_settings(INSTALLED_APPS={"remove": ["django_celery_safe", "tests.app"]}):
        found = find_messages(TASKS={"default": {"BACKEND": BACKEND}})
    assert ids(found) == ["E012"]
    assert "not in INSTALLED_APPS" in found[0].msg


def test_e012_celery_does_not_know_a_queue(app: Celery) -> None:
    """Where it makes no queue that is missing, as with CELERY_TASK_CREATE_MISSING_QUEUES=False."""
    setting = tasks_setting("default")
    setting["default"]["QUEUES"] = ["default", "mails", "reports"]
    app.conf.update(task_queues=[Queue("celery"), Queue("mails")])
    assert find_messages(TASKS=setting, DJANGO_CELERY_SAFE=KEEPING) == []
    app.amqp.queues.create_missing = False
    found = find_messages(TASKS=setting, DJANGO_CELERY_SAFE=KEEPING)
    assert ids(found) == ["E012"]
    assert "does not know, 'reports', and" in found[0].msg


def test_e012_the_database_has_no_outbox() -> None:
    """By the project's routers; without an outbox that is no fault."""
    routers = {"DATABASE_ROUTERS": [f"{__name__}.Nowhere"], "DJANGO_CELERY_SAFE": KEEPING}
    assert ids(find_messages(TASKS=tasks_setting("default"), **routers)) == ["E012"]
    assert find_messages(TASKS=tasks_setting("default", outbox=False), **routers) == []


def test_e012_messages_have_no_headers(app: Celery) -> None:
    """No worker would find the row of a task."""
    app.conf.update(task_protocol=1)
    found = find_messages(TASKS=tasks_setting("default"), DJANGO_CELERY_SAFE=KEEPING)
    assert ids(found) == ["E012"]
