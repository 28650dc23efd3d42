"""A relay in a process of its own."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from django_celery_safe.sending.relay import Relay
from tests.app.celery import app
from tests.processes import FunctionProcess, start_in_process


def run_relay(alias: str) -> None:
    """Relay until the process is killed."""
    app.set_current()
    Relay(alias).run(threading.Event())


@contextmanager
def relaying(alias: str) -> Iterator[FunctionProcess]:
    """Have a relay in a process of its own during the block."""
    with start_in_process(run_relay, alias) as relay:
        yield relay
