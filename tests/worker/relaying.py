"""A relay in a process of its own."""

import threading

from django_celery_safe.sending.relay import Relay
from tests.app.celery import app
from tests.processes import FunctionProcess, start_in_process


def run_relay(alias: str) -> None:
    """Relay until the process is killed."""
    app.set_current()
    Relay(alias).run(threading.Event())


def relaying(alias: str) -> FunctionProcess:
    """Have a relay in a process of its own during the block."""
    return start_in_process(run_relay, alias)
