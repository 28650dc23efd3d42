"""How a run of the scenario ``mails`` is recorded."""

import time

from tests.app.models import Person
from tests.faults.brokers import RedisBroker
from tests.faults.lab import PREFETCH, Lab
from tests.faults.mails import work
from tests.faults.mails.oracle import History, Plan
from tests.faults.nemesis import WorkerNemesis
from tests.faults.scenario import Witness
from tests.processes import CeleryWorker, wait_for
from tests.servers import RedisServer

#: Deliberate faults, and the check that must find each; with two, the guarantee decides.
VARIANTS = {
    "plain": ("unexplained doubles",),
    "flag-last": ("unexplained doubles",),
    "other-guarantee": ("missing mails", "second mails"),
}

#: After so many seconds the broker gives out again what was not acknowledged.
VISIBILITY_TIMEOUT = 3.0


def record(plan: Plan, lab: Lab) -> History:
    """Let workers send e-mails while their children are killed; return what happened."""
    witness, alias = Witness(lab.folder), lab.database("postgres")
    people = [Person(pk=pk, email=f"{pk}@example.org") for pk in range(1, plan.users + 1)]
    Person.everyone.using(alias).bulk_create(people)
    broker = RedisBroker(lab.server(RedisServer), VISIBILITY_TIMEOUT)
    # No task kills its process here, whoever strikes it: none is given up.
    ours = {"MAX_DEATHS": None}
    lab.configure(alias, broker, ours, EMAIL_BACKEND=f"{work.__name__}.Post")
    lab.use_store(broker.server)
    workers = lab.start_workers(
        plan.workers, work.__name__, concurrency=plan.concurrency, prefetch=PREFETCH
    )
    wait_for(lambda: broker.idle_workers() == plan.workers, 60, "the workers take no messages")
    send_and_strike(plan, lab, broker, WorkerNemesis(plan, workers, witness))
    # On a slow machine a message is redelivered, and another run does its work, while it runs.
    wait_for(lambda: not run_now(witness, workers), 30, "a run does not end")
    messages = broker.messages()
    lab.close()
    flags = Person.everyone.using(alias).values_list("pk", work.FLAG)
    return History.read(plan, witness, dict(flags), messages)


def send_and_strike(plan: Plan, lab: Lab, broker: RedisBroker, nemesis: WorkerNemesis) -> None:
    """Send all tasks, kill children at random meanwhile, and wait until all are done."""
    sending = lab.start(work.send, plan)
    for _ in range(plan.users // 2):
        time.sleep(nemesis.random.uniform(*plan.between_kills))
        if (child := nemesis.choose_child()) is not None:
            nemesis.kill_child(child, "at random")
    sending.result(plan.at_most)
    wait_for(lambda: broker.is_drained(plan.workers), plan.at_most, "messages are left")


def run_now(witness: Witness, workers: list[CeleryWorker]) -> set[str]:
    """Return the runs that have begun, and not ended, in processes that live."""
    living = {child.pid for worker in workers for child in worker.children()}
    begun = [entry for entry in witness.journal.entries("taken") if entry["pid"] in living]
    ended = {entry["run"] for entry in witness.journal.entries("over")}
    return {entry["run"] for entry in begun} - ended
