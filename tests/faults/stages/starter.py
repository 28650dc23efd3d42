"""Functions for processes of their own: start the runs, relay the outbox, sweep once."""

import logging
import random
import signal
import threading
import time
from datetime import timedelta
from typing import Any

from django_celery_safe import stages
from django_celery_safe.sending.relay import Relay
from django_celery_safe.stages.repairs import sweep
from django_celery_safe.stages.step_table import step_table
from tests.faults.stages.plan import PATIENCE, Plan, find_witness


def start_runs(plan: Plan) -> None:
    """Start one run after the other."""
    enter()
    chance = random.Random(f"{plan.seed}:starts")
    for number in range(plan.runs):
        stages.start(plan.entries(number))
        time.sleep(chance.expovariate(1 / plan.pause))


def relay() -> None:
    """Relay until a signal, like ``celery_outbox relay``; it sweeps once a minute, too."""
    enter()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    relaying = Relay()
    relaying.run(stop)
    relaying.close()


def sweep_once() -> None:
    """Repair what does not go on; the signals say what."""
    enter()
    sweep(step_table(), timedelta(seconds=PATIENCE))


def enter() -> Any:
    """Be a process of the workers' app, whose signals are noted."""
    # Only here: in the process of the tests they would be of that process's app.
    from tests.faults.stages import work  # noqa: F401
    from tests.stages.worker_app import app

    if (witness := find_witness()) is not None:
        logging.basicConfig(filename=witness.log)
    app.set_current()
    app.finalize()
    return app
