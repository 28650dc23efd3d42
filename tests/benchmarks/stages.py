"""
What runs of stages cost, against Celery's canvases of the same shape, on PostgreSQL and Redis.

The floor of many stages is a chain of chords, with a task between each two that joins their
results, as people write it; that of one stage is a chord. Celery keeps what it knows in
Redis, and loses it with a crash; ours is in PostgreSQL. The steps do nothing. Workers keep
their connection to the database, as a project with such a load would have them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from celery import chain, chord, group

from django_celery_safe import stages
from django_celery_safe.delivery.header import HEADER, Header
from django_celery_safe.models import OutboxMessage, StageStep
from tests.benchmarks.report import Figure, ratio, seconds_of, take_turns
from tests.benchmarks.tools import (
    PATIENT,
    count_queries,
    databases,
    deliver,
    in_process,
    use_app,
    worker_settings,
)
from tests.processes import CeleryWorker, wait_for
from tests.routing import runs_in
from tests.servers import RedisServer, ServerPool
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

#: Seconds until a run has ended, at the most.
LONGEST_RUN = 120

CHAIN, CHORD = "chain of chords", f"chord of {WIDE:,}"
MANY = f"{STAGES} stages x {STEPS} steps"


def run(servers: ServerPool) -> list[Figure]:
    """Measure in a process whose Celery app is new."""
    redis = servers.get(RedisServer)
    redis.flush()
    with databases(servers, None) as (alias,):
        settings = worker_settings(alias, redis)
        patient = {"DJANGO_CELERY_SAFE": PATIENT}
        with CeleryWorker("tests.stages.worker_app", concurrency=CONCURRENCY, settings=settings):
            return in_process(measure, alias, settings, settings=patient)


def measure(alias: str, settings: dict[str, Any]) -> list[Figure]:
    """Measure everything, by the app that the worker runs, and set ours against Celery's."""
    use_app(settings, task_routes={tasks.unread.name: {"queue": "unread"}})
    with runs_in(alias):
        many = [(tasks.nothing, priority) for priority in range(STAGES) for _ in range(STEPS)]
        one, step = one_stage(WIDE), [(tasks.nothing, 1)]
        calls: dict[str, Callable[[], None]] = {
            CHAIN: run_chain,
            MANY: partial(run_plan, many),
            CHORD: run_chord,
            one: partial(run_plan, step * WIDE),
        }
        samples = take_turns(timed(calls), ROUNDS)
        sizes = {one_stage(size): partial(run_plan, step * size) for size in GROWTH}
        growth = take_turns(timed(sizes), LARGE_ROUNDS)
        queries = {size: count_queries_of_a_step(alias, size) for size in (STEPS, WIDE)}
    figures = [
        Figure(f"{name}, s", statistics.median(values), note="joined" if name == CHAIN else "")
        for name, values in (growth | samples).items()
    ]
    figures += [
        Figure(f"{ours} / {floor}", ratio(samples, ours, floor))
        for ours, floor in ((MANY, CHAIN), (one, CHORD))
    ]
    widest = one_stage(WIDEST)
    return [
        *figures,
        Figure(f"{widest} / {WIDE:,}", ratio(growth, widest, one)),
        *[
            Figure(f"queries of a step, 1 of {size:,}", number, note="with BEGIN and COMMIT")
            for size, number in queries.items()
        ],
    ]


def timed(calls: Mapping[str, Callable[[], None]]) -> dict[str, Callable[[], float]]:
    """Return what measures each call, s."""
    return {name: partial(seconds_of, call) for name, call in calls.items()}


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
    many = chord([tasks.nothing_else.si() for _ in range(WIDE)], tasks.join.si())
    many.apply_async().get(timeout=LONGEST_RUN)


def one_stage(size: int) -> str:
    """Return the name of a run of one stage."""
    return f"1 stage x {size:,} steps"


def run_plan(plan: Sequence[Any]) -> None:
    """Run a plan to its end."""
    run = stages.start(plan)

    def has_stopped() -> bool:
        run.refresh_from_db(fields=["status"])
        return run.status in stages.Status.STOPPED

    wait_for(has_stopped, LONGEST_RUN, f"{run} did not end", look=0.005)
    assert run.status == stages.Status.SUCCEEDED, run.error_step


def count_queries_of_a_step(alias: str, size: int) -> int:
    """Return how many queries a step of a stage of so many makes; BEGIN and COMMIT count."""
    run = stages.start([(tasks.unread, 1)] * size)
    first, second, *_ = run.steps
    run_step(first)  # connects, compiles, and notes that the run has begun
    queries = count_queries(alias, partial(run_step, second)) - 1  # that for its message's row
    assert run.progress.done == 2, "a step was not done"
    return queries


def run_step(step: StageStep) -> None:
    """Run a step for its message."""
    message = OutboxMessage.objects.using(step._state.db).carried(step.task_id).get()
    ours = Header(task=step.task, step=step.pk, attempt=message.attempt, using=str(step._state.db))
    header = {HEADER: ours}
    request = {"id": step.task_id, "task": step.task, "headers": header, **header}
    deliver(tasks.unread, {}, request)
