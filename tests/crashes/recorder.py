"""Records what becomes of transactions' tasks while everything around them is killed."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections

from django_celery_safe.models import OutboxMessage
from tests.app.models import Person
from tests.crashes import broken, tasks
from tests.crashes.checker import History
from tests.crashes.nemesis import Troublemaker
from tests.crashes.plan import SEND_TIMEOUT, Plan, Witness
from tests.processes import CeleryWorker, Journal, start_in_process, wait_for
from tests.servers import RedisServer, Server

#: Pause between two looks at the processes, s.
LOOK = 0.02

#: What the broker may take for an answer where no time is set by the package, s.
SILENCE = 2.0


class LastingRedis(RedisServer):
    """Redis that has everything on the disk before it answers."""

    def command(self) -> list[str | Path]:
        """Append each change to a file, and wait for the disk."""
        command = super().command()
        command[command.index("--appendonly") + 1] = "yes"
        return [*command, "--appendfsync", "always"]


def record(plan: Plan, broker: Server, store: RedisServer, alias: str, folder: Path) -> History:
    """
    Send tasks while processes are killed, let a worker run them, and return what happened.

    The worker begins when all else is over: kombu takes a message from Redis before it
    notes that it has it, so a Redis that is stopped in between loses it.

    Args:
        broker: Is stopped and started; empty.
        store: Place of locks and results, which stays; it is emptied before.
        alias: A PostgreSQL database, empty but migrated.
        folder: Where the witnesses write, empty.
    """
    store.flush()
    witness = Witness(folder)
    settings = make_settings(broker, store, alias)
    with Troublemaker(plan, witness, broker, settings) as trouble:
        make_trouble(plan, witness, trouble)
        with suppress(TimeoutError):
            wait_for(lambda: not OutboxMessage.objects.using(alias).exists(), plan.patience)
        trouble.terminate()
    committed = Person.everyone.using(alias).values_list("email", flat=True)
    run_tasks(plan, witness, settings, set(committed))
    people = Person.everyone.using(alias).values_list("email", "is_welcome_email_sent")
    rows = OutboxMessage.objects.using(alias).order_by("pk")
    left = [f"{row}, due at {row.due_at}, {row.error}" for row in rows]
    return History.read(plan, witness, dict(people), left)


def make_settings(broker: Server, store: RedisServer, alias: str) -> dict[str, Any]:
    """Return the Django settings of all processes; ``alias`` is their default database."""
    database = connections.settings[alias]
    names = ("ENGINE", "NAME", "USER", "HOST", "PORT")
    on_redis = isinstance(broker, RedisServer)
    waits = ("socket_timeout", "socket_connect_timeout") if on_redis else ()
    return {
        "DATABASES": {DEFAULT_DB_ALIAS: {name: database[name] for name in names}},
        "CACHES": {
            "default": {
                "BACKEND": "django_redis.cache.RedisCache",
                "LOCATION": store.database_url(0),
            }
        },
        "CELERY_BROKER_URL": broker.database_url(1) if on_redis else broker.url,
        "CELERY_BROKER_TRANSPORT_OPTIONS": dict.fromkeys(waits, SILENCE),
        "CELERY_RESULT_BACKEND": store.database_url(2),
        "DJANGO_CELERY_SAFE": {"OUTBOX_SEND_TIMEOUT": SEND_TIMEOUT},
    }


def make_trouble(plan: Plan, witness: Witness, trouble: Troublemaker) -> None:
    """Run senders and relays until all has gone wrong and enough was sent."""
    ends_at = time.monotonic() + plan.at_most
    while time.monotonic() < ends_at:
        if not trouble.strike() and witness.journal.count("begun") >= plan.transactions:
            break
        time.sleep(LOOK)
    trouble.calm()


def run_tasks(plan: Plan, witness: Witness, settings: dict[str, Any], wanted: set[str]) -> None:
    """Let a worker run all tasks that there are, and those that these send."""
    include = f"{tasks.__name__},{broken.__name__}"
    journal = witness.journal
    with CeleryWorker("tests.app", arguments=["--include", include], settings=settings) as worker:
        with start_in_process(send_end, str(witness.folder), settings=settings) as sending:
            sending.result(30)
        # It is the last message of the queue, and a worker takes them in order.
        wait_for(lambda: journal.count("end"), plan.patience, "the last message never came")
        while not wanted <= set(journal.tally("name", "greeted")) and grows(journal, plan.quiet):
            pass
        worker.stop()


def grows(journal: Journal, seconds: float) -> bool:
    """Wait for something new; tell whether it came."""
    number = journal.count()
    try:
        return wait_for(lambda: journal.count() > number, seconds)
    except TimeoutError:
        return False


def send_end(folder: str) -> None:
    """Send the last message."""
    tasks.end.delay(folder)
