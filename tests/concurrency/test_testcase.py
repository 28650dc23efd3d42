"""Eager single-instance tasks in a plain Django ``TestCase``, on every store that can list."""

from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.test import TestCase
from pytest_django import Settings

from django_celery_safe import SafeTask, single_instance
from tests.app.models import Person
from tests.concurrency.holders import held_by
from tests.concurrency.mailbox import Mailbox
from tests.concurrency.test_options import held_names
from tests.testcases import run_testcase


@pytest.fixture(params=["django-redis", "local", "database", "default database"])
def aliases(
    request: pytest.FixtureRequest, settings: Settings, use_store: Callable[[str], None]
) -> set[str]:
    """Put the locks into one store after another; the databases that a TestCase then needs."""
    if "database" not in request.param:
        use_store(request.param)
        return {"default"}
    is_default = request.param == "default database"
    alias: str = "default" if is_default else request.getfixturevalue("db_alias")
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": alias}  # type: ignore[arg-type]
    return {"default", alias}


# Not in a transaction of its own, but with the tables.
@pytest.mark.django_db(transaction=True)
def test_eager_tasks_run_in_a_testcase(aliases: set[str], mailbox: Mailbox) -> None:
    """Tasks run, conflict, raise and free their locks, whether or not inside ``atomic()``."""
    mailbox.app.conf.update(task_always_eager=True, task_eager_propagates=True)

    @single_instance(key="{name}")
    def sign_up(name: str) -> Any:
        Person.everyone.create(email=name)
        if name == "nobody":
            raise ValueError(name)
        return held_names()

    signing_up = mailbox.task(sign_up, base=SafeTask, name="tests.sign_up")

    class Plain(TestCase):
        databases = aliases

        def test_a_task_runs(self) -> None:
            for _ in range(2):
                assert signing_up.delay("ann").get() == ["tests.sign_up:ann"]
            assert Person.everyone.filter(email="ann").count() == 2
            assert held_names() == []

        def test_a_duplicate_is_skipped(self) -> None:
            with held_by("tests.sign_up:bob", "first"):
                assert signing_up.delay("bob").get() is None
            assert signing_up.delay("bob").get() == ["tests.sign_up:bob"]

        def test_a_task_fails(self) -> None:
            with pytest.raises(ValueError, match="nobody"):
                signing_up.delay("nobody")
            assert held_names() == []

        def test_a_task_is_sent_on_commit(self) -> None:
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
                sent = signing_up.delay_on_commit("cleo")
                assert sent.state == "PENDING"
            assert sent.get() == ["tests.sign_up:cleo"]

    run_testcase(Plain)
    assert held_names() == []
    assert not Person.everyone.exists()
