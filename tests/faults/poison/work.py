"""The task of the runs, which notes what it does outside of the package."""

import os
import signal
import time
from typing import Any, Final

from celery import shared_task
from celery.signals import task_failure

from django_celery_safe import SafeTask
from tests.faults.carried.plan import find_witness

#: How long a task takes, s.
SECONDS: Final = 0.01


@shared_task(base=SafeTask)
def work(number: int, *, kills: bool) -> None:
    """Work for a moment, or kill this process."""
    journal = find_witness().journal
    journal.write("begun", task=number)
    if kills:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(SECONDS)
    journal.write("done", task=number)


@task_failure.connect(sender=work)
def record_failure(args: Any, exception: BaseException, **kwargs: Any) -> None:
    """Note that a task failed, and of what."""
    find_witness().journal.write("failed", task=args[0], error=type(exception).__name__)
