"""
Cost of single-instance and unique tasks on a real worker, as a ratio to a plain one.

The floor is a no-op ``@shared_task`` without results, on a worker at its usual log
level INFO. Broker and locks have a Redis each, so that what locks ask is counted
apart. The worker is paused while a batch is sent, and then works it off: neither slows
the other. Each call has an argument, and so a key, of its own: all of them run.

Each batch is compared with the floor's batch of the same round. The worker's main process does
the same for every task, and its CPU differs by chance, by a tenth from batch to batch. It is two
thirds of a run. So the main process of the floor's batch counts for all. ``plain again`` shows
how far to trust the figures.
"""

import gc
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import count, islice
from typing import Any, NamedTuple

import redis
from celery import shared_task
from django.conf import settings
from django.test import override_settings

from django_celery_safe import SafeTask, single_instance
from tests.benchmarks.locks import COMPARE_AND_DELETE, LEASE
from tests.benchmarks.report import Figure, take_turns
from tests.benchmarks.tools import caches_on, in_process
from tests.processes import CeleryWorker, wait_for
from tests.servers import RedisServer, ServerPool

#: Rounds of ours, of the peers, and how many tasks are sent and run in one.
ROUNDS, OF_PEERS, BATCH = 24, 8, 75

#: From worker to worker the same code differs by some percent: where its memory lies, the order
#: of its dicts.
WORKERS = 5

#: A worker is at rest if it used less CPU than this in that time, s. An idle one uses, on
#: average, less than a tenth of it.
RESTING, LOOK = 0.002, 0.1

#: The bases of the peers' tasks, by package.
PEERS = {"celery_once": "QueueOnce", "celery_singleton": "Singleton"}

FLOOR, AGAIN, RAW, SINGLE = "plain", "plain again", "raw lock", "single_instance"
UNIQUE = ("unique_until=start", "unique_until=end")
OURS = (SINGLE, *UNIQUE)


@shared_task
def plain(number: int) -> None:
    """Do nothing."""


@shared_task
def plain_again(number: int) -> None:
    """Do nothing, as a second candidate."""


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


def set_bare(number: int) -> None:
    """Make one bare request, as the least that a send that is unique can need."""
    client, _ = bare_lock(settings.CACHES["default"]["LOCATION"])
    client.set(f"sent:{number}", "token", nx=True, px=LEASE * 1000)


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
PRESENT = [package for package in PEERS if package not in MISSING]

CANDIDATES: dict[str, Any] = {
    FLOOR: plain,
    AGAIN: plain_again,
    RAW: locked,
    **dict(zip(OURS, (single, until_start, until_end), strict=True)),
    **{package: task_of_peer(package) for package in PRESENT},
}


class Batch(NamedTuple):
    """The time of one batch, for each of its tasks."""

    #: Sending it: µs, µs of CPU of the sender, round trips to the Redis of the locks.
    send: float
    send_cpu: float
    send_trips: float
    #: Running it: µs, µs of CPU of the worker's main process and of its children, round trips.
    run: float
    main_cpu: float
    children_cpu: float
    run_trips: float

    @property
    def run_cpu(self) -> float:
        """The µs of CPU of all processes of the worker."""
        return self.main_cpu + self.children_cpu


#: The batches of each candidate, each with the floor's of the same round, for each worker.
Measured = Sequence[Mapping[str, Sequence[tuple[Batch, Batch]]]]


def run(servers: ServerPool) -> list[Figure]:
    """Measure all candidates in the same rounds, from processes whose Celery app is new."""
    return figures_of([in_process(measure) for _ in range(WORKERS)])


def measure() -> dict[str, list[tuple[Batch, Batch]]]:
    """Let each candidate in turn send a batch to a worker, and be run by it."""
    numbers = count()
    with RedisServer() as broker, RedisServer() as locks, caches_on(locks):
        changes = {
            "CELERY_BROKER_URL": broker.url,
            "CELERY_ONCE": {
                "backend": "celery_once.backends.Redis",
                "settings": {"url": locks.url},
            },
            "CELERY_SINGLETON_BACKEND_URL": locks.url,
        }
        with (
            override_settings(**changes),
            broker.client() as queues,
            CeleryWorker("tests.app", arguments=["--include", __name__]) as worker,
        ):
            send = partial(send_and_run, numbers, worker, partial(are_left, queues), locks)
            candidates = {name: partial(send, task) for name, task in CANDIDATES.items()}
            candidates[RAW] = partial(candidates[RAW], beside=set_bare)
            peers = {name: candidates.pop(name) for name in PRESENT}
            peers[FLOOR] = candidates[FLOOR]
            ours, others = beside_floor(candidates, ROUNDS), beside_floor(peers, OF_PEERS)
            return ours | {name: others[name] for name in PRESENT}


def beside_floor(
    candidates: Mapping[str, Callable[[], Batch]], rounds: int
) -> dict[str, list[tuple[Batch, Batch]]]:
    """Let candidates take turns; return each one's batches with the floor's of the same round."""
    taken = take_turns(candidates, rounds)
    return {name: list(zip(taken[name], taken[FLOOR], strict=True)) for name in taken}


def are_left(queues: "redis.Redis") -> bool:
    """Return whether the broker has messages that no worker has acknowledged."""
    return bool(queues.exists("celery", "unacked"))


def send_and_run(
    numbers: Iterator[int],
    worker: CeleryWorker,
    are_left: Callable[[], object],
    locks: RedisServer,
    task: Any,
    beside: Callable[[int], object] = lambda number: None,
) -> Batch:
    """
    Send a batch to the paused worker, then let it work until it is at rest.

    Args:
        are_left: Returns whether messages wait to be run.
        beside: Called with the number of each call before it is sent.
    """
    worker.pause()
    calls = list(islice(numbers, BATCH))
    gc.disable()
    with locks.counting() as sending:
        began, cpu_before = time.perf_counter(), time.process_time()
        for number in calls:
            beside(number)
            task.delay(number)
        send, send_cpu = time.perf_counter() - began, time.process_time() - cpu_before
    gc.enable()
    with locks.counting() as running:
        before, began = cpu_of(worker), time.perf_counter()
        worker.resume()
        wait_for(lambda: not are_left(), 60, "messages are left")
        run = time.perf_counter() - began
        # Acknowledged is what was begun: the last ones may not have ended.
        wait_for(lambda: is_at_rest(worker), 60, "the worker did not come to rest")
        main_cpu, children_cpu = map(operator.sub, cpu_of(worker), before)
    trips = (sending.round_trips / BATCH, running.round_trips / BATCH)
    send, send_cpu, run, main_cpu, children_cpu = (
        seconds / BATCH * 1e6 for seconds in (send, send_cpu, run, main_cpu, children_cpu)
    )
    return Batch(send, send_cpu, trips[0], run, main_cpu, children_cpu, trips[1])


def cpu_of(worker: CeleryWorker) -> tuple[float, float]:
    """Return the seconds of CPU, user and system, of the worker's main process and its children."""

    def used(pid: int) -> float:
        # Linux's name for the CPU clock of a process: to the ns, where /proc has 10 ms.
        return time.clock_gettime((~pid << 3) | 2)

    return used(worker.pid), sum(used(child.pid) for child in worker.children())


def is_at_rest(worker: CeleryWorker) -> bool:
    """Look for a while whether the worker still does something."""
    before = sum(cpu_of(worker))
    time.sleep(LOOK)
    return sum(cpu_of(worker)) - before < RESTING


def figures_of(measured: Measured) -> list[Figure]:
    """Set what each candidate took against the floor's batch of the same round."""
    others = [name for name in measured[0] if name != FLOOR]
    notes = {name: "ours" if name in OURS else "peer" for name in others}
    notes |= {RAW: "floor", AGAIN: "how far to trust the others"}
    missing = f"; not installed: {', '.join(MISSING)}" if MISSING else ""
    runs = {name: ratio_of_runs(measured, name) for name in others}
    figures = [
        Figure(f"{FLOOR}, µs of CPU", median_of(measured, FLOOR, "run_cpu"), note="worker -c 2")
    ]
    figures += [
        Figure(f"{name} / {FLOOR}", value, note=notes[name]) for name, value in runs.items()
    ]
    added = runs[SINGLE] - runs[RAW]
    figures.append(Figure(f"({SINGLE} - {RAW}) / {FLOOR}", added, note="as many trips"))
    figures.append(Figure(f"{FLOOR} .delay(), µs of CPU", median_of(measured, FLOOR, "send_cpu")))
    sends = {name: ratio(measured, name, "send_cpu") for name in others}
    for name, value in sends.items():
        note = f"{notes[name]}; time {ratio(measured, name, 'send'):.2f}"
        figures.append(Figure(f".delay(), {name} / {FLOOR}", value, note=note))
    dearest = max(sends[other] for other in (RAW, *PRESENT))
    for name in UNIQUE:
        value = sends[name] / dearest
        figures.append(Figure(f".delay(), {name} / dearest other", value, note=", ".join(PRESENT)))
    for what in ("run", "send"):
        # The mean: one round trip too many shows.
        for name in others:
            trips = statistics.fmean(values_of(measured, name, f"{what}_trips"))
            figures.append(Figure(f"{name}: trips of a {what}", trips))
    return figures + speeds(measured, {FLOOR: f"±15 %{missing}"})


def speeds(measured: Measured, notes: Mapping[str, str]) -> list[Figure]:
    """Return how many tasks a second each candidate's worker ran."""
    return [
        Figure(
            f"{name}: tasks/s",
            1e6 / median_of(measured, name, "run"),
            better="higher",
            note=notes.get(name, ""),
        )
        for name in measured[0]
    ]


def ratio(measured: Measured, name: str, field: str) -> float:
    """Return candidate / floor: the median over all rounds of one worker, the mean of workers."""
    return statistics.fmean(
        statistics.median(getattr(own, field) / getattr(floor, field) for own, floor in pairs[name])
        for pairs in measured
    )


def ratio_of_runs(measured: Measured, name: str) -> float:
    """Return the same of the CPU of runs, with the floor's main process for both."""
    return statistics.fmean(
        statistics.median(
            (floor.main_cpu + own.children_cpu) / floor.run_cpu for own, floor in pairs[name]
        )
        for pairs in measured
    )


def median_of(measured: Measured, name: str, field: str) -> float:
    """Return the median of a candidate over all rounds of all workers."""
    return statistics.median(values_of(measured, name, field))


def values_of(measured: Measured, name: str, field: str) -> list[float]:
    """Return what the batches of a candidate took, in all rounds of all workers."""
    return [getattr(own, field) for pairs in measured for own, _ in pairs[name]]
