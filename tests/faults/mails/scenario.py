"""How a run of the scenario ``mails`` is recorded."""

import random
import time
from typing import Any

from tests.app.models import Person
from tests.faults.brokers import RedisBroker
from tests.faults.lab import PREFETCH, Lab
from tests.faults.mails import work
from tests.faults.mails.nemesis import Killer
from tests.faults.mails.oracle import History
from tests.faults.mails.plan import EMAIL_TIMEOUT, VISIBILITY_TIMEOUT, Plan, Witness
from tests.faults.mails.server import HOST, MailServer
from tests.processes import CeleryWorker, wait_for
from tests.servers import RedisServer

#: Deliberate faults, and the check that must find each; with two, the guarantee decides.
VARIANTS = {
    "plain": ("unexplained doubles",),
    "flag-last": ("unexplained doubles",),
    "other-guarantee": ("missing mails", "second mails"),
}


def record(plan: Plan, lab: Lab) -> History:
    """Let workers send e-mails while their children are killed; return what happened."""
    witness, alias = Witness(lab.folder), lab.database("postgres")
    people = [Person(pk=pk, email=f"{pk}@example.org") for pk in range(1, plan.users + 1)]
    Person.everyone.using(alias).bulk_create(people)
    mail = lab.enter_context(MailServer(plan, witness.server))
    broker = RedisBroker(lab.server(RedisServer), VISIBILITY_TIMEOUT)
    lab.use_database(alias)
    lab.use_store(broker.server)
    lab.settings |= {
        **broker.settings(),
        "CELERY_TASK_IGNORE_RESULT": True,
        # No task kills its process here, whoever strikes it: none is given up.
        "DJANGO_CELERY_SAFE": {"MAX_DEATHS": None},
        "EMAIL_BACKEND": "django.core.mail.backends.smtp.EmailBackend",
        "EMAIL_HOST": HOST,
        "EMAIL_PORT": mail.port,
        "EMAIL_TIMEOUT": EMAIL_TIMEOUT,
    }
    workers = lab.start_workers(
        plan.workers,
        work.__name__,
        concurrency=plan.concurrency,
        prefetch=PREFETCH,
    )
    wait_for(lambda: broker.idle_workers() == plan.workers, 10, "the workers take no messages")
    send_all(plan, lab, broker, Killer(plan, witness, mail, workers))
    # On a slow machine a message is redelivered, and another run does its work, while it runs.
    wait_for(lambda: not run_now(witness, workers), 30, "a run does not end")
    messages = broker.messages()
    lab.close()
    flags = Person.everyone.using(alias).values_list("pk", work.FLAG)
    return History.read(plan, witness, dict(flags), messages)


def send_all(plan: Plan, lab: Lab, broker: RedisBroker, killer: Killer) -> None:
    """Send all tasks, and let the nemesis strike until they are done or time is up."""
    ends_at = time.monotonic() + plan.at_most
    sending = lab.start(send, plan, str(lab.folder))
    while sending.running or not broker.is_drained(plan.workers):
        killer.strike()
        if time.monotonic() > ends_at:
            break
    sending.result(0)


def run_now(witness: Witness, workers: list[CeleryWorker]) -> set[str]:
    """Return the runs that have begun, and not ended, in processes that live."""
    living = {child.pid for worker in workers for child in worker.children()}
    begun = {entry["run"] for entry in witness.tasks.entries("taken") if entry["pid"] in living}
    return begun - {entry["run"] for entry in witness.tasks.entries("over")}


def send(plan: Plan, folder: str) -> None:
    """Send the task of each user several times at once."""
    chance = random.Random(f"{plan.seed}:sends")
    task: Any = work.TASKS[plan.broken]
    for user in range(1, plan.users + 1):
        time.sleep(chance.expovariate(1 / plan.pause))
        for _ in range(plan.copies):
            task.delay(folder, user, plan.guarantee)
