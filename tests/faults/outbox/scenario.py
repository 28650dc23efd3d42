"""How a run of the scenario ``outbox`` is recorded."""

import time
from contextlib import closing, suppress

from django_celery_safe.models import OutboxMessage
from tests.app.models import Person
from tests.faults.lab import SEND_TIMEOUT, Lab
from tests.faults.outbox import broken, work
from tests.faults.outbox.nemesis import Troublemaker
from tests.faults.outbox.oracle import History
from tests.faults.outbox.plan import Plan, Witness
from tests.faults.scenario import Stillness
from tests.processes import wait_for
from tests.servers import RedisServer

#: Pause between two looks at the processes, s.
LOOK = 0.02

#: How long the worker may take for all messages of a run, s.
LONGEST_RUN = 120

#: Deliberate faults, and the check that must find each.
VARIANTS = {
    "plain": ("lost tasks",),
    "last-id": ("lost tasks",),
    "delete-first": ("lost tasks",),
    "deferred-retry": ("undone effects",),
}


def record(plan: Plan, lab: Lab) -> History:
    """
    Send tasks while processes are killed, let a worker run them, and return what happened.

    The worker begins when all else is over: kombu takes a message from Redis before it
    records that it has it, so a Redis that is stopped in between loses it.
    """
    witness, alias = Witness(lab.folder), lab.database(plan.database)
    lab.use_database(alias)
    lab.use_store(lab.server(RedisServer))
    lab.settings["DJANGO_CELERY_SAFE"] = {"OUTBOX_SEND_TIMEOUT": SEND_TIMEOUT}
    broker = lab.make_broker(plan.broker, lasting=True)
    lab.settings |= broker.settings()
    trouble = lab.enter_context(closing(Troublemaker(plan, witness, broker.server, lab.settings)))
    make_trouble(plan, witness, trouble)
    with suppress(TimeoutError):
        wait_for(lambda: not OutboxMessage.objects.using(alias).exists(), plan.patience)
    trouble.terminate()
    people = Person.everyone.using(alias)
    run_tasks(plan, witness, lab, set(people.values_list("email", flat=True)))
    rows = OutboxMessage.objects.using(alias).order_by("pk")
    left = [f"{row}, due at {row.due_at}, {row.error}" for row in rows]
    flags = dict(people.values_list("email", "is_welcome_email_sent"))
    return History.read(plan, witness, flags, left)


def make_trouble(plan: Plan, witness: Witness, trouble: Troublemaker) -> None:
    """Run senders and relays until all has gone wrong and enough was sent."""
    ends_at = time.monotonic() + plan.at_most
    while time.monotonic() < ends_at:
        trouble.strike()
        if trouble.is_spent and witness.journal.count("begun") >= plan.transactions:
            break
        time.sleep(LOOK)
    trouble.calm()


def run_tasks(plan: Plan, witness: Witness, lab: Lab, wanted: set[str]) -> None:
    """Let a worker run all tasks that there are, and those that these send."""
    journal = witness.journal
    (worker,) = lab.start_workers(plan, f"{work.__name__},{broken.__name__}")
    lab.start(send_end).result(30)
    # It is the last message of the queue, and a worker takes them in order.
    wait_for(lambda: journal.count("end"), LONGEST_RUN, "the last message never came")
    still = Stillness(journal, plan.at_most)
    while not wanted <= set(journal.tally("name", "greeted")) and still.seconds() < plan.quiet:
        time.sleep(LOOK)
    worker.stop()


def send_end() -> None:
    """Send the last message."""
    work.end.delay()
