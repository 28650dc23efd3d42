"""
Messages that are delivered twice: a worker that takes one puts the same one back.

At the edge of the broker, below Celery: same id, same headers but for a mark, same body.
"""

import random
from contextlib import suppress
from functools import partial
from typing import Any, Final

from celery.signals import task_received

from tests.faults.stages.plan import LATEST, TWICE, Witness

#: Header of what is there for the second time.
MARK: Final = "tests_again"

#: Part of the second deliveries that comes at once, and meets the first.
AT_ONCE: Final = 0.5


def connect(witness: Witness) -> None:
    """Let this process, if it is a worker, deliver some messages twice, and note it."""

    @task_received.connect(weak=False)
    def deliver_again(sender: Any, request: Any, **kwargs: Any) -> None:
        if MARK in request.message.headers or random.random() >= TWICE:
            return
        again = partial(_publish, witness, request.app, request.message, request.id)
        if random.random() < AT_ONCE:
            again()
        else:
            sender.timer.call_after(random.uniform(0, LATEST), again)


def _publish(witness: Witness, app: Any, message: Any, task_id: str) -> None:
    # While the broker is away, nothing is delivered, once or twice.
    with suppress(OSError, *app.connection_for_write().connection_errors):
        with app.connection_for_write() as connection:
            connection.Producer(auto_declare=False).publish(
                message.body,
                exchange="",
                routing_key=app.conf.task_default_queue,
                headers={**message.headers, MARK: True},
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                correlation_id=task_id,
                retry=False,
            )
        witness.trouble.write("again", id=task_id)
