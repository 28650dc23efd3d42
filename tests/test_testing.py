"""What django_celery_safe.testing gives to projects."""

import pytest
from celery import Celery
from django.db import transaction
from django.test import TestCase
from pytest_django import Settings

from django_celery_safe import cache_lock, find_lock
from django_celery_safe.testing import locks_in_memory, on_commit_now, waiting_for_commit
from tests.app.models import Person
from tests.app.tasks import add
from tests.servers import RedisServer


def queue_length(redis_server: RedisServer) -> int:
    """Return how many messages wait in the broker."""
    with redis_server.client(db=1) as client:
        return int(client.llen("celery"))


def test_locks_are_in_memory_and_cleared(settings: Settings) -> None:
    """Whatever the settings say, locks live in memory, and none is left for the next test."""
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "default", "LOCK_TIMEOUT": 5}
    with locks_in_memory():
        lock = cache_lock("kept")
        assert lock.acquire()
        assert 4 < lock.remaining <= 5
    with locks_in_memory():
        assert find_lock("kept") is None
    assert settings.DJANGO_CELERY_SAFE["LOCK_DATABASE"] == "default"


def test_on_commit_sends_at_the_end_of_the_block(
    on_commit_now: None, broker: Celery, redis_server: RedisServer
) -> None:
    """What waits for a commit goes out at the end of the outermost atomic of the tested code."""
    with transaction.atomic():
        with transaction.atomic():
            add.delay_on_commit(1, 2)
        assert queue_length(redis_server) == 0
    assert queue_length(redis_server) == 1


def test_on_commit_sends_at_once_outside_a_block(
    on_commit_now: None, broker: Celery, redis_server: RedisServer
) -> None:
    """Outside atomic() a send goes out at once, as in autocommit."""
    add.delay_on_commit(1, 2)
    assert queue_length(redis_server) == 1


def test_on_commit_drops_what_is_rolled_back(
    on_commit_now: None, broker: Celery, redis_server: RedisServer
) -> None:
    """What is rolled back stays unsent, whole blocks and savepoints alike."""
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        add.delay_on_commit(1, 2)
        raise ZeroDivisionError
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            add.delay_on_commit(3, 4)
            raise ZeroDivisionError
        add.delay_on_commit(5, 6)
    assert queue_length(redis_server) == 1


@pytest.mark.django_db
def test_without_it_nothing_is_sent_in_a_test(broker: Celery, redis_server: RedisServer) -> None:
    """Without the fixture a test's sends wait for a commit that never comes, as Django's do."""
    before = waiting_for_commit()
    with transaction.atomic():
        add.delay_on_commit(1, 2)
    assert waiting_for_commit() == before + 1
    assert queue_length(redis_server) == 0


class InPlainTestCase(TestCase):
    """unittest projects use the context manager."""

    def test_callbacks_see_the_rows(self) -> None:
        """A callback runs after the block and sees its rows."""
        seen: list[int] = []
        with on_commit_now(), transaction.atomic():
            Person.everyone.create()
            transaction.on_commit(lambda: seen.append(Person.everyone.count()))
            assert seen == []
        assert seen == [1]
