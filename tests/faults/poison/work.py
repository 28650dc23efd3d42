"""The task of the runs, which notes what it does outside of the package, and its sender."""

import os
import signal
import time
from typing import Any, Final

from celery import shared_task
from celery.signals import task_failure
from django.db import transaction

from django_celery_safe import SafeTask
from tests.faults.scenario import enter, find_witness

#: How many tasks one transaction sends.
BATCH: Final = 50


@shared_task(base=SafeTask)
def work(number: int, *, kills: bool) -> None:
    """Work for a moment, or kill this process."""
    journal = find_witness().journal
    journal.write("begun", task=number)
    if kills:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
    journal.write("done", task=number)


@task_failure.connect(sender=work)
def record_failure(args: Any, exception: BaseException, **kwargs: Any) -> None:
    """Note that a task failed, and of what."""
    # A worker sends the signal for each of its processes that died, too.
    if (error := type(exception).__name__) != "WorkerLostError":
        find_witness().journal.write("failed", task=args[0], error=error)


def send(tasks: int, poisonous: set[int]) -> None:
    """Commit one transaction after the other."""
    enter()
    for first in range(0, tasks, BATCH):
        with transaction.atomic():
            for number in range(first, min(first + BATCH, tasks)):
                work.delay_on_commit(number, kills=number in poisonous)
