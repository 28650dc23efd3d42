"""
How long a commit waits for a broker that refuses, or is silent, with sends of the outbox.

The floor is the same transaction without a send, in the same round. A silent broker may
cost OUTBOX_SEND_TIMEOUT once, whatever was sent; its figures are what the sends add,
divided by that.
"""

import logging
import random
import socket
import statistics
import time
from collections.abc import Callable, Sequence

from celery import Celery, Task, chord, group
from django.db import transaction
from django.test import override_settings

from django_celery_safe import SafeTask, send_on_commit
from django_celery_safe.sending.broker import _silent_until
from tests.app.models import Person
from tests.benchmarks.outbox import outboxes
from tests.benchmarks.report import Figure
from tests.processes import dead_port, start_in_process
from tests.servers import ServerPool

ROUNDS = 8

#: OUTBOX_SEND_TIMEOUT, s.
TIMEOUT = 1.0

#: Seconds until all is measured, at the most.
LONGEST = 300

FLOOR = "no send"

#: The sends of one transaction, by name.
SENDS: dict[str, Callable[["Task[..., object]", str], object]] = {
    "task": lambda task, alias: send_on_commit(task.s(1), using=alias, outbox=True),
    "3 tasks": lambda task, alias: [
        send_on_commit(task.s(n), using=alias, outbox=True) for n in range(3)
    ],
    "group": lambda task, alias: send_on_commit(
        group(task.s(n) for n in range(5)), using=alias, outbox=True
    ),
    "chord": lambda task, alias: send_on_commit(
        chord([task.s(1), task.s(2)], task.s()), using=alias, outbox=True
    ),
}


def run(servers: ServerPool) -> list[Figure]:
    """Measure commits in a process of their own, whose Celery apps are new."""
    with outboxes(servers, 1) as (alias,), start_in_process(measure, alias, ROUNDS) as measuring:
        return figures_of(measuring.result(LONGEST))


def measure(alias: str, rounds: int) -> dict[str, list[float]]:
    """Return for each kind of outage and send the seconds that each commit took."""
    logging.getLogger("django_celery_safe").setLevel(logging.CRITICAL)  # each send fails
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = listening.getsockname()[1]
        refusing = {scheme: make_task(f"{scheme}://", dead_port()) for scheme in ("redis", "amqp")}
        waiting = make_task("redis://", silent)
        sends: dict[str, Callable[[], object]] = {FLOOR: lambda: None}
        for scheme, task in refusing.items():
            sends[f"{scheme} refuses"] = lambda task=task: SENDS["task"](task, alias)  # type: ignore[misc]
        for name, send in SENDS.items():
            sends[f"silent: {name}"] = lambda send=send: send(waiting, alias)  # type: ignore[misc]
        with override_settings(DJANGO_CELERY_SAFE={"OUTBOX_SEND_TIMEOUT": TIMEOUT}):
            times: dict[str, list[float]] = {name: [] for name in sends}
            # The first round connects and imports, and is not counted.
            for _ in range(rounds + 1):
                for name in random.sample(list(sends), len(sends)):
                    times[name].append(time_commit(sends[name], alias))
    return {name: found[1:] for name, found in times.items()}


def make_task(scheme: str, port: int) -> "Task[..., object]":
    """Return a task of an app whose broker, and result backend, is at this port."""
    app = Celery(f"{scheme}{port}", set_as_current=False)
    backend = f"redis://127.0.0.1:{port}/0"
    app.conf.update(broker_url=f"{scheme}127.0.0.1:{port}//", result_backend=backend)

    @app.task(base=SafeTask, name="tests.outage")
    def work(number: int = 0) -> None:
        """Do nothing."""

    return work


def time_commit(send: Callable[[], object], alias: str) -> float:
    """Return how long a transaction with a send in it takes, s."""
    _silent_until.clear()  # each transaction asks the broker
    began = time.perf_counter()
    with transaction.atomic(using=alias):
        Person.everyone.using(alias).create()
        send()
    return time.perf_counter() - began


def figures_of(times: dict[str, list[float]]) -> list[Figure]:
    """Subtract the floor of the same round; divide what waits for silence by the timeout."""
    figures = [Figure(f"{FLOOR}, s", statistics.median(times[FLOOR]), note="floor")]
    for name, seconds in times.items():
        if name.startswith("silent"):
            added = added_to(times[FLOOR], seconds) / TIMEOUT
            figures.append(Figure(f"{name} / OUTBOX_SEND_TIMEOUT", added))
        elif name != FLOOR:
            figures.append(Figure(f"{name}: added, s", added_to(times[FLOOR], seconds)))
    return figures


def added_to(floor: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the median of what was added in each round."""
    return statistics.median(ours - theirs for ours, theirs in zip(seconds, floor, strict=True))
