"""
How long a commit waits for a broker that refuses, or is silent, with sends of the outbox.

The floor is the same transaction without a send, in the same round. A silent broker may
cost OUTBOX_SEND_TIMEOUT once, whatever was sent; its figures are what the sends add,
divided by that.
"""

import logging
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial

from celery import Celery, Task, chord, group
from django.db import transaction
from django.test import override_settings

from django_celery_safe import SafeTask, send_on_commit
from django_celery_safe.sending.broker import _silent_until
from tests.app.models import Person
from tests.benchmarks.outbox import outboxes
from tests.benchmarks.report import Figure, take_turns
from tests.processes import dead_port, start_in_process
from tests.servers import ServerPool

ROUNDS = 8

#: OUTBOX_SEND_TIMEOUT, s.
TIMEOUT = 1.0

#: Seconds until all is measured, at the most.
LONGEST = 300

FLOOR = "no send"


def run(servers: ServerPool) -> list[Figure]:
    """Measure commits in a process of their own, whose Celery apps are new."""
    with outboxes(servers, 1) as (alias,), start_in_process(measure, alias) as measuring:
        times: dict[str, list[float]] = measuring.result(LONGEST)
    figures = [Figure(f"{FLOOR}, s", statistics.median(times[FLOOR]), note="floor")]
    for name, seconds in times.items():
        pairs = zip(seconds, times[FLOOR], strict=True)
        added = statistics.median(ours - theirs for ours, theirs in pairs)
        if name.startswith("silent"):
            figures.append(Figure(f"{name} / OUTBOX_SEND_TIMEOUT", added / TIMEOUT))
        elif name != FLOOR:
            figures.append(Figure(f"{name}: added, s", added))
    return figures


def measure(alias: str) -> dict[str, list[float]]:
    """Return for each kind of outage and send the seconds that each commit took."""
    logging.getLogger("django_celery_safe").setLevel(logging.CRITICAL)  # each send fails
    send = partial(send_on_commit, using=alias, outbox=True)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        task = make_task("redis", listening.getsockname()[1])
        refusing = {scheme: make_task(scheme, dead_port()) for scheme in ("redis", "amqp")}
        sends: dict[str, Callable[[], object]] = {
            FLOOR: lambda: None,
            "redis refuses": lambda: send(refusing["redis"].s(1)),
            "amqp refuses": lambda: send(refusing["amqp"].s(1)),
            "silent: task": lambda: send(task.s(1)),
            "silent: 3 tasks": lambda: [send(task.s(number)) for number in range(3)],
            "silent: group": lambda: send(group(task.s(number) for number in range(5))),
            "silent: chord": lambda: send(chord([task.s(1), task.s(2)], task.s())),
        }
        with override_settings(DJANGO_CELERY_SAFE={"OUTBOX_SEND_TIMEOUT": TIMEOUT}):
            return take_turns(
                {name: partial(time_commit, call, alias) for name, call in sends.items()}, ROUNDS
            )


def make_task(scheme: str, port: int) -> "Task[..., object]":
    """Return a task of an app whose broker, and result backend, is at this port."""
    app = Celery(f"{scheme}{port}", set_as_current=False)
    backend = f"redis://127.0.0.1:{port}/0"
    app.conf.update(broker_url=f"{scheme}://127.0.0.1:{port}//", result_backend=backend)

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
