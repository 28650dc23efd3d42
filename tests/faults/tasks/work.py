"""The tasks of a run: one for each meaning of ``unique_until``."""

import random
import time
from typing import Any

from celery import shared_task

from django_celery_safe import SafeTask, single_instance
from tests.faults.scenario import find_witness
from tests.faults.tasks.plan import LEASE, VISIBILITY_TIMEOUT
from tests.processes import Gauge

#: The folder of the gauge, which sees how many runs of one task and key go on at once.
GAUGE = "gauge"

#: How a run ends by itself, and how often of a hundred times.
ENDINGS = {"done": 70, "failed": 8, "retried": 14, "taken up again": 8}

#: Longest time, s, that a run takes, and how often of a thousand times: some outlast
#: their lease, a few the broker's patience.
DURATIONS = {0.1: 880, 0.6: 100, LEASE + 1: 12, VISIBILITY_TIMEOUT + 1: 8}

#: Longest pause before a task's own retry, s.
LONGEST_RETRY = 0.4


class Hiccup(Exception):
    """Celery takes up the task again, because of ``autoretry_for``."""


class Watched(SafeTask):
    """Notes each message that is taken up, run or not, and each that is over."""

    abstract = True
    max_retries = None

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Note a message before its lock is asked for."""
        find_witness().journal.write("tried", id=task_id)

    def after_return(
        self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
    ) -> None:
        """Note the end of a task when all its locks have been given back."""
        if status in {"SUCCESS", "FAILURE"}:
            find_witness().journal.write("over", id=task_id, status=status)


OPTIONS: Any = {
    "base": Watched,
    "bind": True,
    "acks_late": True,
    "reject_on_worker_lost": True,
    "autoretry_for": (Hiccup,),
    "default_retry_delay": 0.1,
}
ALONE: Any = {"key": "{key}", "on_conflict": "retry", "retry_delay": 0.3, "timeout": LEASE}


@shared_task(**OPTIONS)
@single_instance(unique_until="start", **ALONE)
def until_start(self: Any, key: str) -> None:
    """Work; a message that is sent meanwhile runs afterwards."""
    work(self, key)


@shared_task(**OPTIONS)
@single_instance(unique_until="end", **ALONE)
def until_end(self: Any, key: str) -> None:
    """Work; a message that is sent meanwhile is a duplicate."""
    work(self, key)


TASKS: dict[str, Any] = {"start": until_start, "end": until_end}


def work(task: Any, key: str) -> None:
    """Be inside for a while, then end in one way or another."""
    witness = find_witness()
    # By chance, not by the task: a run that outlasts the broker's timeout is redelivered, which
    # would go on for ever if each of its runs were as long.
    (longest,) = random.choices(list(DURATIONS), list(DURATIONS.values()))
    (ending,) = random.choices(list(ENDINGS), list(ENDINGS.values()))
    since = time.monotonic_ns()
    section = f"{task.name}:{key}"
    with witness.room.inside(key), Gauge(witness.folder / GAUGE).inside(section):
        time.sleep(random.uniform(longest / 2, longest))
        witness.journal.write("ended", id=task.request.id, since=since, ending=ending)
    match ending:
        case "failed":
            raise ValueError(ending)
        case "retried":
            raise task.retry(countdown=random.uniform(0, LONGEST_RETRY))
        case "taken up again":
            raise Hiccup
