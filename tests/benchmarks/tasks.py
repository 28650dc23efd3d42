"""
Cost of single-instance and unique tasks on a real worker, as a ratio to a plain one.

The floor is a no-op ``@shared_task`` without results, on a worker at its usual log
level INFO. Broker and locks have a Redis each, so that what locks ask is counted
apart. The worker is paused while a batch is sent, and then works it off: neither slows
the other. Each call has an argument, and so a key, of its own: all of them run.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import count, islice
from typing import Any, NamedTuple

import redis
from celery import shared_task
from django.conf import settings
from django.test import override_settings

from django_celery_safe import SafeTask, single_instance
from tests.benchmarks.locks import COMPARE_AND_DELETE, LEASE, caches_on
from tests.benchmarks.report import Figure
from tests.processes import CeleryWorker, start_in_process, wait_for
from tests.servers import RedisServer, ServerPool

#: Rounds, and how many tasks of each candidate are sent and run in one.
ROUNDS, BATCH = 40, 75

#: Seconds until all is measured, at the most.
LONGEST = 600

#: A worker is at rest if it used less CPU than this in that time, s. An idle one uses, on
#: average, less than a tenth of it.
RESTING, LOOK = 0.002, 0.1

#: Where kombu keeps messages that are to be delivered, and those that are not acknowledged.
QUEUE, UNACKNOWLEDGED = "celery", "unacked"

#: The bases of the peers' tasks, by package.
PEERS = {"celery_once": "QueueOnce", "celery_singleton": "Singleton"}

FLOOR = "plain"
RAW = "raw lock"
SINGLE = "single_instance"
UNTIL_START = "unique_until=start"
UNTIL_END = "unique_until=end"

OURS = (SINGLE, UNTIL_START, UNTIL_END)


@shared_task
def plain(number: int) -> None:
    """Do nothing."""


@shared_task
def locked(number: int) -> None:
    """Do nothing, under the least that a lock can be: two bare requests."""
    client, release = bare_lock(settings.CACHES["default"]["LOCATION"])
    assert client.set(f"raw:{number}", "token", nx=True, px=LEASE * 1000)
    assert release(keys=[f"raw:{number}"], args=["token"])


@lru_cache
def bare_lock(url: str) -> tuple["redis.Redis", Callable[..., Any]]:
    """Return a client of this process with one kept connection, and what frees a lock in it."""
    client = redis.Redis.from_url(url, single_connection_client=True)
    return client, client.register_script(COMPARE_AND_DELETE)


@shared_task(base=SafeTask)
@single_instance
def single(number: int) -> None:
    """Do nothing, one at a time."""


@shared_task(base=SafeTask)
@single_instance(unique_until="start")
def until_start(number: int) -> None:
    """Do nothing, one at a time, sent once before it starts."""


@shared_task(base=SafeTask)
@single_instance(unique_until="end")
def until_end(number: int) -> None:
    """Do nothing, one at a time, sent once before it ends."""


def task_of_peer(package: str) -> Any:
    """Return a task that does nothing, with the defaults of another package."""

    def nothing(number: int) -> None:
        pass

    base = getattr(import_module(package), PEERS[package])
    return shared_task(base=base, name=f"{__name__}.{package}")(nothing)


MISSING = [package for package in PEERS if find_spec(package) is None]

CANDIDATES: dict[str, Any] = {
    FLOOR: plain,
    RAW: locked,
    SINGLE: single,
    UNTIL_START: until_start,
    UNTIL_END: until_end,
    **{package: task_of_peer(package) for package in PEERS if package not in MISSING},
}


class Batch(NamedTuple):
    """The time of one batch, for each of its tasks."""

    #: Sending it: µs, µs of CPU of the sender, round trips to the Redis of the locks.
    send: float
    send_cpu: float
    send_trips: float
    #: Running it: µs, µs of CPU of all processes of the worker, round trips.
    run: float
    run_cpu: float
    run_trips: float


Batches = Mapping[str, Sequence[Batch]]


def run(servers: ServerPool) -> list[Figure]:
    """Measure all candidates in the same rounds, from a process whose Celery app is new."""
    with start_in_process(measure, ROUNDS, BATCH) as measuring:
        return figures_of(measuring.result(LONGEST))


def measure(rounds: int, size: int) -> dict[str, list[Batch]]:
    """Let each candidate in turn send a batch of this size to a worker, and be run by it."""
    batches: dict[str, list[Batch]] = {name: [] for name in CANDIDATES}
    numbers = count()
    with (
        RedisServer() as broker,
        RedisServer() as locks,
        caches_on(locks),
        override_settings(**celery_settings(broker, locks)),
        broker.client() as queues,
        CeleryWorker("tests.app", arguments=["--include", __name__]) as worker,
    ):
        # The first round connects, and is not counted.
        for number in range(rounds + 1):
            for name in random.sample(list(CANDIDATES), len(CANDIDATES)):
                calls = list(islice(numbers, size))
                batch = send_and_run(
                    CANDIDATES[name], calls, worker, lambda: are_left(queues), locks
                )
                batches[name] += [batch] if number else []
    return batches


def celery_settings(broker: RedisServer, locks: RedisServer) -> dict[str, Any]:
    """Return what the app and the peers are told about the servers."""
    return {
        "CELERY_BROKER_URL": broker.url,
        "CELERY_ONCE": {"backend": "celery_once.backends.Redis", "settings": {"url": locks.url}},
        "CELERY_SINGLETON_BACKEND_URL": locks.url,
    }


def are_left(queues: "redis.Redis") -> bool:
    """Return whether the broker has messages that no worker has acknowledged."""
    return bool(queues.exists(QUEUE, UNACKNOWLEDGED))


def send_and_run(
    task: Any,
    calls: Sequence[int],
    worker: CeleryWorker,
    are_left: Callable[[], object],
    locks: RedisServer,
) -> Batch:
    """
    Send a batch to the paused worker, then let it work until it is at rest.

    Args:
        are_left: Returns whether messages wait to be run.
    """
    worker.pause()
    with locks.counting() as sending:
        send, send_cpu = time_sending(task, calls)
    with locks.counting() as running:
        cpu_before, began = cpu_of(worker), time.perf_counter()
        worker.resume()
        wait_for(lambda: not are_left(), 60, "messages are left")
        run = time.perf_counter() - began
        # Acknowledged is what was begun: the last ones may not have ended.
        wait_for(lambda: is_at_rest(worker), 60, "the worker did not come to rest")
        run_cpu = cpu_of(worker) - cpu_before
    micro, tasks = 1e6, len(calls)
    return Batch(
        send / tasks * micro,
        send_cpu / tasks * micro,
        sending.round_trips / tasks,
        run / tasks * micro,
        run_cpu / tasks * micro,
        running.round_trips / tasks,
    )


def time_sending(task: Any, calls: Iterable[int]) -> tuple[float, float]:
    """Send a batch; return the seconds that passed, and those of this process's CPU."""
    gc.collect()
    gc.disable()
    try:
        began, cpu_before = time.perf_counter(), time.process_time()
        for number in calls:
            task.delay(number)
        return time.perf_counter() - began, time.process_time() - cpu_before
    finally:
        gc.enable()


def cpu_of(worker: CeleryWorker) -> float:
    """Return the seconds of CPU, user and system, that the worker's processes used so far."""
    return sum(map(cpu_of_process, (worker.pid, *(child.pid for child in worker.children()))))


def cpu_of_process(pid: int) -> float:
    """Return the seconds of CPU of all threads of one process: to the ns; /proc has 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's name for the CPU clock of a process


def is_at_rest(worker: CeleryWorker) -> bool:
    """Look for a while whether the worker still does something."""
    before = cpu_of(worker)
    time.sleep(LOOK)
    return cpu_of(worker) - before < RESTING


def figures_of(batches: Batches) -> list[Figure]:
    """Set what each candidate took against the floor's batch of the same round."""
    others = [name for name in batches if name != FLOOR]
    sent = [name for name in others if name != RAW]  # which is sent as the floor is
    missing = f"; not installed: {', '.join(MISSING)}" if MISSING else ""
    return [
        Figure(f"{FLOOR}, µs of CPU", median(batches, FLOOR, "run_cpu"), note="worker -c 2"),
        *[
            Figure(f"{name} / {FLOOR}", ratio(batches, name, "run_cpu"), note=describe(name))
            for name in others
        ],
        Figure(f"{SINGLE} / {RAW}", ratio(batches, SINGLE, "run_cpu", RAW), note="as many trips"),
        Figure(f"{FLOOR} .delay(), µs of CPU", median(batches, FLOOR, "send_cpu")),
        *[
            Figure(
                f".delay(), {name} / {FLOOR}",
                ratio(batches, name, "send_cpu"),
                note=f"{describe(name)}; time {ratio(batches, name, 'send'):.2f}",
            )
            for name in sent
        ],
        *[Figure(f"{name}: trips of a run", mean(batches, name, "run_trips")) for name in others],
        *[Figure(f"{name}: trips of a send", mean(batches, name, "send_trips")) for name in sent],
        *[
            Figure(
                f"{name}: tasks/s",
                1e6 / median(batches, name, "run"),
                better="higher",
                note=f"±15 %{missing}" if name == FLOOR else "",
            )
            for name in batches
        ],
    ]


def describe(name: str) -> str:
    """Say whose a candidate is."""
    return "ours" if name in OURS else "floor" if name == RAW else "peer"


def ratio(batches: Batches, name: str, field: str, floor: str = FLOOR) -> float:
    """Return the median over all rounds of candidate / floor within one round."""
    pairs = zip(batches[name], batches[floor], strict=True)
    return statistics.median(getattr(one, field) / getattr(least, field) for one, least in pairs)


def median(batches: Batches, name: str, field: str) -> float:
    """Return the median of a candidate over all rounds."""
    return statistics.median(getattr(batch, field) for batch in batches[name])


def mean(batches: Batches, name: str, field: str) -> float:
    """Return the mean of a candidate over all rounds: one round trip too many shows."""
    return statistics.fmean(getattr(batch, field) for batch in batches[name])
