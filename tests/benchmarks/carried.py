"""
Cost of carrying a task until it is done, on PostgreSQL and Redis, as a ratio to a plain one.

The floor is a no-op ``@shared_task`` without results on a worker of two processes, at its usual
log level INFO. Workers keep their connection to the database, as a project with such a load
would have them. The worker is paused while a batch is sent, and then works it off. That a send
costs one query and a run two is asserted by tests/sending/test_carried.py; what a relay's look
costs at a million rows is measured by the benchmark of the outbox, whose statement it is.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from celery import shared_task

from django_celery_safe import SafeTask
from tests.benchmarks.report import Figure
from tests.benchmarks.stages import use_app, worker_settings
from tests.benchmarks.tasks import Batch, median, ratio, send_and_run
from tests.processes import CeleryWorker, start_in_process
from tests.servers import RedisServer, ServerPool
from tests.servers.databases import Databases

#: Rounds, and how many tasks of each candidate are sent and run in one.
ROUNDS, BATCH = 20, 75

#: Seconds until all is measured, at the most.
LONGEST = 600

PLAIN, CARRIED = "plain", "carried"


@shared_task
def plain(number: int) -> None:
    """Do nothing."""


@shared_task(base=SafeTask, outbox="until_done")
def carried(number: int) -> None:
    """Do nothing, and be carried until it is done."""


class Sender(NamedTuple):
    """
    Sends carried tasks whose rows are in one database.

    Attributes:
        alias: That of the database.
    """

    alias: str

    def delay(self, number: int) -> None:
        """Send one."""
        carried.apply_async_on_commit((number,), using=self.alias)


def run(servers: ServerPool) -> list[Figure]:
    """Measure on PostgreSQL and Redis, in a process whose Celery app is new."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Databases(servers, folder).alias("postgres", folder) as alias,
            start_in_process(measure, alias) as measuring,
        ):
            return figures_of(measuring.result(LONGEST))


def measure(alias: str) -> dict[str, list[Batch]]:
    """Let each candidate in turn send a batch to the worker, and be run by it."""
    candidates = {PLAIN: plain, CARRIED: Sender(alias)}
    batches: dict[str, list[Batch]] = {name: [] for name in candidates}
    numbers = count()
    with RedisServer() as redis:
        settings = worker_settings(alias, redis)
        use_app(settings)
        with (
            redis.client(db=1) as queues,
            CeleryWorker(
                "tests.stages.worker_app",
                concurrency=2,
                settings=settings,
                arguments=["--include", __name__],
            ) as worker,
        ):
            # The first round connects and compiles, and is not counted.
            for number in range(ROUNDS + 1):
                for name in random.sample(list(candidates), len(candidates)):
                    calls = list(islice(numbers, BATCH))
                    batch = send_and_run(candidates[name], calls, worker, queues, redis)
                    batches[name] += [batch] if number else []
    return batches


def figures_of(batches: Mapping[str, Sequence[Batch]]) -> list[Figure]:
    """Set the carried tasks against the plain ones of the same round."""
    return [
        Figure(f"{PLAIN}, µs of CPU", median(batches, PLAIN, "run_cpu"), note="worker -c 2"),
        Figure(f"{CARRIED} / {PLAIN}", ratio(batches, CARRIED, "run_cpu"), note="of the worker"),
        Figure(f"{PLAIN} send, µs", median(batches, PLAIN, "send")),
        Figure(
            f"{CARRIED} send / {PLAIN}",
            ratio(batches, CARRIED, "send"),
            note="with its INSERT and COMMIT",
        ),
        *[
            Figure(f"{name}: tasks/s", 1e6 / median(batches, name, "run"), better="higher")
            for name in batches
        ],
    ]
