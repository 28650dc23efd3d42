"""The task of the runs, which notes what it does outside of the package's tables."""

import os
import time
from typing import Any, Final

from celery import shared_task

from django_celery_safe import SafeTask
from tests.faults.carried import broken
from tests.faults.carried.plan import LEASE
from tests.faults.scenario import Witness, find_fault, find_witness

#: How long a process sleeps at a time, and what is longer than any such sleep, s: the lease
#: may be over by then, which is renewed at a third of it.
STEP: Final = 0.05
STANDSTILL: Final = LEASE / 2

#: Shortest and longest pause before a task's own retry, s.
RETRY_DELAY: Final = 0.3


class PlannedFailure(Exception):
    """The error of a task that is to fail."""


@shared_task(base=SafeTask, bind=True, max_retries=5)
def work(self: Any, ending: str, seconds: float) -> None:
    """Be inside for a while, then end as it is planned."""
    witness, request = find_witness(), self.request
    what = {"id": request.id, "retries": request.retries, "worker": os.getppid()}
    ends = "done" if request.retries else ending
    with witness.room.inside(request.id):
        witness.journal.write("begun", **what)
        sleep(witness, request.id, seconds)
        witness.journal.write("ended", ending=ends, **what)
        match ends:
            case "retried":
                raise self.retry(countdown=RETRY_DELAY)
            case "failed":
                raise PlannedFailure(request.id)


def sleep(witness: Witness, task_id: str, seconds: float) -> None:
    """Sleep, and note if this process stood still meanwhile, whoever or whatever did that."""
    ends_at = time.monotonic() + seconds
    while (left := ends_at - (began := time.monotonic())) > 0:
        time.sleep(min(left, STEP))
        if time.monotonic() - began > STANDSTILL:
            witness.journal.write("stood still", id=task_id)


if fault := find_fault():
    setattr(*broken.FAULTS[fault])
