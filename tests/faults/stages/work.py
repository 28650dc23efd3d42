"""
The processes of the runs: they start runs, relay, or work.

The steps note what they do outside of the package's tables. A process that imports this also
notes what the package says, if the settings say where. A worker that takes a message puts some
of them back, at the edge of the broker and below Celery: same id, same headers but for a mark,
same body.
"""

import random
import time
from contextlib import suppress
from functools import partial
from typing import Any, Final

from celery import shared_task
from celery.signals import task_received
from django.conf import settings
from django.dispatch import receiver

from django_celery_safe import SafeTask, stages
from django_celery_safe.models import StageRun, StageStep
from django_celery_safe.signals import claim_lost
from tests.faults.scenario import enter, find_fault, find_witness, relay
from tests.faults.stages.plan import BEAT, LATEST, TWICE, Plan
from tests.stages import broken

Params = dict[str, Any]

#: Header of a message that is there for the second time.
MARK: Final = "tests_again"


def start_runs(plan: Plan) -> None:
    """Start one run after the other."""
    enter()
    chance = random.Random(f"{plan.seed}:starts")
    for number in range(plan.runs):
        stages.start(plan.entries(number))
        time.sleep(chance.expovariate(1 / plan.pause))


def enter_and_relay() -> None:
    """Relay until a signal."""
    enter()
    relay()


@shared_task(base=SafeTask, acks_late=True, reject_on_worker_lost=True)
@stages.step
def late(params: Params, run: StageRun, step: StageStep, seconds: float) -> Params:
    """Work; the broker has the message until this has ended."""
    return work(params, step, seconds)


@shared_task(base=SafeTask)
@stages.step
def early(params: Params, run: StageRun, step: StageStep, seconds: float) -> Params:
    """Work; a kill of its process loses the message."""
    return work(params, step, seconds)


def work(params: Params, step: StageStep, seconds: float) -> Params:
    """Be inside for a while; return what says that this step was done."""
    witness, journal = find_witness(), find_witness().journal
    with witness.room.inside(str(step.pk)):
        journal.write("begun", step=step.pk, known=len(params))
        time.sleep(seconds)
        time.sleep(-time.monotonic() % BEAT)
        journal.write("ended", step=step.pk)
    return {f"{step.stage - 1}.{step.position}": True}


def watch() -> None:
    """Note what the package says, and deliver some messages twice."""
    trouble = find_witness().trouble

    @receiver(claim_lost, weak=False)
    def note_loss(key: str, **kwargs: Any) -> None:
        trouble.write("lost", task_id=key.rpartition("[")[2].removesuffix("]"))

    @task_received.connect(weak=False)
    def deliver_again(sender: Any, request: Any, **kwargs: Any) -> None:
        if MARK in request.message.headers or random.random() >= TWICE:
            return
        again = partial(publish_again, request.app, request.message, request.id)
        if random.random() < 0.5:  # at once, and meets the first
            again()
        else:
            sender.timer.call_after(random.uniform(0, LATEST), again)


def publish_again(celery: Any, message: Any, task_id: str) -> None:
    """Put a message back, unless the broker is away: then nothing is delivered at all."""
    with suppress(OSError, *celery.connection_for_write().connection_errors):
        with celery.connection_for_write() as connection:
            connection.Producer(auto_declare=False).publish(
                message.body,
                exchange="",
                routing_key=celery.conf.task_default_queue,
                headers={**message.headers, MARK: True},
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                correlation_id=task_id,
                retry=False,
            )
        find_witness().trouble.write("again", id=task_id)


if hasattr(settings, "TEST_WITNESS"):
    watch()
    broken.use(find_fault())
