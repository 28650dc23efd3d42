"""
Copies of a message that met the lock of its own task id, where something else happens too.

The visibility timeout is long, and the broker is told of a message that it has waited
for so long: when it is delivered again is the test's to say.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded

from django_celery_safe.delivery.header import HEADER
from tests.conftest import LOOKING_OFTEN, app_on_redis
from tests.faults.brokers import RedisBroker
from tests.processes import CeleryWorker
from tests.servers import RedisServer
from tests.versions import needs_quick_redelivery
from tests.worker import copy_tasks
from tests.worker.rooms import Room

pytestmark = needs_quick_redelivery

VISIBILITY_TIMEOUT = 20
#: Seconds for what has to come; a lease is 3 s or 6 s, a time limit 12 s.
PATIENCE = 30


class Story:
    """A task that was sent into a room of its own, its broker and its worker."""

    def __init__(
        self, worker: CeleryWorker, server: RedisServer, folder: Path, task: Any, **options: Any
    ) -> None:
        self.worker = worker
        self.server = server
        self.room = Room(folder)
        self.result = task.apply_async((self.room.path,), **options)
        self.id: str = self.result.id
        self.room.until(self.room.runs, "it does not run", PATIENCE)

    def messages(self) -> list[str]:
        """
        Return the kind of each message with its id that the broker has, waiting or given out.

        A message that is just being taken from its queue is in neither of the two places yet, so
        a number of messages shows nothing.
        """
        return [
            "copy" if "copy" in one.get(HEADER, {}) else "original"
            for one in RedisBroker(self.server).headers()
            if one["id"] == self.id
        ]

    def deliver_again(self) -> None:
        """Let the broker see that its message was not acknowledged for too long."""
        with self.server.client(db=1) as client:
            (tag,) = [
                tag
                for tag, text in client.hgetall("unacked").items()
                if json.loads(text)[0]["headers"]["id"] == self.id
            ]
            long_ago = time.time() - VISIBILITY_TIMEOUT - 1
            client.zadd("unacked_index", {tag: long_ago}, xx=True)

    def until_copied(self) -> None:
        """Wait until the worker has logged that it sent a copy."""
        told = re.compile(f"{self.id}.*a copy arrives|a copy arrives.*{self.id}")
        self.room.until(lambda: told.search(self.worker.log), "no copy", PATIENCE)

    def until_over(self) -> None:
        """Wait until the broker has no message of it any more."""
        self.room.until(lambda: not self.messages(), "messages are left over", PATIENCE)

    def retries(self) -> list[int]:
        """Return of each run, in order, how many retries were before it."""
        assert self.room.gauge.violations() == []
        return [run["retries"] for run in self.room.runs()]


@pytest.fixture(scope="module")
def worker(redis_server: RedisServer) -> Iterator[CeleryWorker]:
    """A worker for the module, whose broker looks for late messages twice a second."""
    include = ["--include", copy_tasks.__name__]
    with (
        app_on_redis(
            redis_server, "django", visibility_timeout=VISIBILITY_TIMEOUT, **LOOKING_OFTEN
        ),
        CeleryWorker("tests.app", concurrency=4, arguments=include) as worker,
    ):
        yield worker


@pytest.fixture
def begin(worker: CeleryWorker, redis_server: RedisServer, tmp_path: Path) -> Iterator[Any]:
    """Send a task and wait until it runs; at the test's end nothing of it waits."""
    yield lambda task, **options: Story(worker, redis_server, tmp_path, task, **options)
    (tmp_path / "gate").touch()


def test_a_killed_run_is_run_again_by_its_copy(begin: Any) -> None:
    """Its message is the broker's no more: the one copy runs, once."""
    story = begin(copy_tasks.staying)
    story.deliver_again()
    story.until_copied()
    # Until the second delivery is acknowledged, the death of the first would put it back.
    story.room.until(lambda: story.messages() == ["copy"], "there is not one copy alone")
    story.room.kill_run()
    story.room.open()
    assert story.result.get(timeout=PATIENCE) == [story.id, 0]
    story.until_over()
    assert story.retries() == [0, 0]


@pytest.mark.long
def test_a_run_that_its_time_limit_ends_is_not_repeated(begin: Any) -> None:
    """Each run would be delivered again before its limit, and followed by another without end."""
    story = begin(copy_tasks.limited)
    story.deliver_again()
    story.until_copied()
    with pytest.raises(TimeLimitExceeded):
        story.result.get(timeout=PATIENCE)
    story.until_over()
    assert story.retries() == [0]
