"""
What runs of stages cost, against Celery's canvases of the same shape, on PostgreSQL and Redis.

The floor of many stages is a chain of chords, with a task between each two that joins their
results, as people write it; that of one stage is a chord. Celery keeps what it knows in
Redis, and loses it with a crash; ours is in PostgreSQL. The steps do nothing. Workers keep
their connection to the database, as a project with such a load would have them.
"""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from celery import chain, chord, group
from celery.app.trace import build_tracer
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_celery_safe import stages
from django_celery_safe.delivery.header import HEADER, Header
from django_celery_safe.models import StageStep
from tests.benchmarks.report import Figure, ratio
from tests.processes import CeleryWorker, start_in_process
from tests.routing import runs_in
from tests.servers import RedisServer, ServerPool
from tests.servers.databases import Databases
from tests.stages import tasks

#: How many stages of how many steps, how many steps in one stage, and in a large one.
STAGES, STEPS = 20, 10
WIDE, WIDEST = 1_000, 4_000

#: Sizes of one stage, to see how its time grows.
GROWTH = (10, 100, WIDE, WIDEST)

#: Rounds of the former two, and of the large one.
ROUNDS, LARGE_ROUNDS = 7, 3

#: Processes that run steps.
CONCURRENCY = 2

#: Seconds until a run has ended, and until all is measured, at the most.
LONGEST_RUN, LONGEST = 120, 900

#: How often is looked whether a run has ended, s.
LOOK = 0.005

CHAIN, CHORD = "chain of chords", f"chord of {WIDE:,}"
MANY, ONE = f"{STAGES} stages x {STEPS} steps", f"1 stage x {WIDE:,} steps"

#: For each candidate the seconds of each round.
Samples = Mapping[str, Sequence[float]]


class Measured(NamedTuple):
    """The figures of a measurement."""

    samples: Samples
    #: Seconds of runs of one stage, of each size, side by side.
    growth: Samples
    #: For each number of steps in a stage, the queries of one of them.
    queries: Mapping[int, int]


def run(servers: ServerPool) -> list[Figure]:
    """Measure on PostgreSQL and Redis, in a process whose Celery app is new."""
    redis = servers.get(RedisServer)
    redis.flush()
    with TemporaryDirectory() as name:
        folder = Path(name)
        with Databases(servers, folder).alias(servers.database, folder) as alias:
            settings = worker_settings(alias, redis)
            with (
                CeleryWorker("tests.stages.worker_app", concurrency=CONCURRENCY, settings=settings),
                start_in_process(measure, alias, settings) as measuring,
            ):
                return figures_of(measuring.result(LONGEST))


def worker_settings(alias: str, redis: RedisServer) -> dict[str, Any]:
    """Return the settings of the worker, whose default database is the one with the runs."""
    given = connections.settings[alias]
    database = {name: given[name] for name in ("ENGINE", "NAME", "USER", "HOST", "PORT")}
    return {
        "DATABASES": {"default": {**database, "CONN_MAX_AGE": None}},
        "CELERY_BROKER_URL": redis.database_url(1),
        "CELERY_RESULT_BACKEND": redis.database_url(2),
        # Without it Celery closes the connection after each task, whatever CONN_MAX_AGE is.
        "CELERY_DB_REUSE_MAX": 1_000_000,
    }


def measure(alias: str, settings: Mapping[str, Any]) -> Measured:
    """Measure everything, by the app that the worker runs."""
    use_app(settings)
    with runs_in(alias):
        candidates = {
            CHAIN: run_chain,
            MANY: run_many,
            CHORD: run_chord,
            ONE: partial(run_one_stage, WIDE),
        }
        return Measured(
            samples=interleaved(candidates, ROUNDS),
            growth=interleaved(
                {one_stage(size): partial(run_one_stage, size) for size in GROWTH}, LARGE_ROUNDS
            ),
            queries={size: count_queries(alias, size) for size in (STEPS, WIDE)},
        )


def use_app(settings: Mapping[str, Any]) -> None:
    """Let this process, whose app is to be a new one, send as the worker does."""
    from tests.stages.worker_app import app  # it becomes the current one of who imports it

    app.conf.update(
        broker_url=settings["CELERY_BROKER_URL"],
        result_backend=settings["CELERY_RESULT_BACKEND"],
        task_routes={tasks.unread.name: {"queue": "unread"}},
    )


def interleaved(
    candidates: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Run each candidate once in each round, in an order of its own; return its seconds."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    # The first round connects and compiles, and is not counted.
    for counted in range(rounds + 1):
        for name in random.sample(list(candidates), len(candidates)):
            began = time.perf_counter()
            candidates[name]()
            if counted:
                samples[name].append(time.perf_counter() - began)
    return samples


def run_chain() -> None:
    """Run stages as Celery can: chords one after the other, each joined by a task."""
    parts = [
        part
        for _ in range(STAGES)
        for part in (group(tasks.nothing_else.si() for _ in range(STEPS)), tasks.join.si())
    ]
    chain(*parts).apply_async().get(timeout=LONGEST_RUN)


def run_chord() -> None:
    """Run many tasks, and one when all of them have ended."""
    chord([tasks.nothing_else.si() for _ in range(WIDE)], tasks.join.si()).apply_async().get(
        timeout=LONGEST_RUN
    )


def run_many() -> None:
    """Run stages, one after the other."""
    run_plan([(tasks.nothing, priority) for priority in range(STAGES) for _ in range(STEPS)])


def one_stage(size: int) -> str:
    """Return the name of a run of one stage."""
    return f"1 stage x {size:,} steps"


def run_one_stage(size: int) -> None:
    """Run one stage of so many steps."""
    run_plan([(tasks.nothing, 1)] * size)


def run_plan(plan: Sequence[Any]) -> None:
    """Run a plan to its end."""
    run = stages.start(plan)
    give_up_at = time.monotonic() + LONGEST_RUN
    while run.status not in stages.Status.STOPPED:
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{run} did not end: {run.progress}")
        time.sleep(LOOK)
        run.refresh_from_db(fields=["status"])
    assert run.status == stages.Status.SUCCEEDED, run.error_step


def count_queries(alias: str, size: int) -> int:
    """Return how many queries a step of a stage of so many makes; BEGIN and COMMIT count."""
    run = stages.start([(tasks.unread, 1)] * size)
    first, second, *_ = run.steps
    deliver(first)  # connects, compiles, and notes that the run has begun
    with CaptureQueriesContext(connections[alias]) as queries:
        deliver(second)
    assert run.progress.done == 2, "a step was not done"
    return len(queries)


def deliver(step: StageStep) -> None:
    """Run a step for its message, as a worker does."""
    header = {HEADER: Header(task=step.task, step=step.pk)}
    request = {"id": step.task_id, "task": step.task, "headers": header, "delivery_info": {}}
    trace = build_tracer(step.task, tasks.unread, app=tasks.unread.app, propagate=True)
    trace(step.task_id, [{}], {}, {**request, **header})


def figures_of(measured: Measured) -> list[Figure]:
    """Set ours against Celery's run of the same round."""
    samples, growth = measured.samples, measured.growth
    return [
        Figure(f"{CHAIN}, s", statistics.median(samples[CHAIN]), note="with join tasks"),
        Figure(f"{MANY}, s", statistics.median(samples[MANY])),
        Figure(f"{MANY} / {CHAIN}", ratio(samples, MANY, CHAIN)),
        Figure(f"{CHORD}, s", statistics.median(samples[CHORD])),
        Figure(f"{ONE}, s", statistics.median(samples[ONE])),
        Figure(f"{ONE} / {CHORD}", ratio(samples, ONE, CHORD)),
        *[
            Figure(f"{one_stage(size)}, s", statistics.median(growth[one_stage(size)]))
            for size in GROWTH
            if size != WIDE
        ],
        Figure(f"{one_stage(WIDEST)} / {WIDE:,}", ratio(growth, one_stage(WIDEST), ONE)),
        *[
            Figure(f"queries of a step, 1 of {size:,}", queries, note="with BEGIN and COMMIT")
            for size, queries in measured.queries.items()
        ],
    ]
