"""Records what becomes of users' e-mails while the mail server misbehaves and children die."""

import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Empty
from typing import Any

import psutil

from tests.app.models import Person
from tests.chaos.broker import Broker
from tests.crashes.recorder import make_settings
from tests.mails import tasks
from tests.mails.checker import History
from tests.mails.plan import EMAIL_TIMEOUT, VISIBILITY_TIMEOUT, Plan, Witness
from tests.mails.server import HOST, MailServer
from tests.processes import CeleryWorker, start_in_process, wait_for
from tests.servers import RedisServer

#: Messages for each child that a worker may hold: a message whose child was killed may
#: keep its place until the broker gives it out again.
PREFETCH = 16


def record(plan: Plan, server: RedisServer, alias: str, folder: Path) -> History:
    """
    Let workers send e-mails while their children are killed; return what happened.

    Args:
        server: The broker; it is emptied before.
        alias: A PostgreSQL database, empty but migrated.
        folder: Where the witnesses write, empty.
    """
    server.flush()
    witness = Witness(folder)
    people = [Person(pk=pk, email=f"{pk}@example.org") for pk in range(1, plan.users + 1)]
    Person.everyone.using(alias).bulk_create(people)
    with MailServer(plan, witness.server) as mail, ExitStack() as stack:
        settings = {
            **make_settings(server, server, alias),
            "CELERY_BROKER_TRANSPORT_OPTIONS": {
                "visibility_timeout": VISIBILITY_TIMEOUT,
                "unacked_restore_interval": 0.5,
                "unacked_restore_throttle": 1,
            },
            "CELERY_TASK_IGNORE_RESULT": True,
            "EMAIL_BACKEND": "django.core.mail.backends.smtp.EmailBackend",
            "EMAIL_HOST": HOST,
            "EMAIL_PORT": mail.port,
            "EMAIL_TIMEOUT": EMAIL_TIMEOUT,
        }
        broker = stack.enter_context(Broker(server))
        workers = stack.enter_context(run_workers(plan, settings))
        wait_for(lambda: broker.waiting() == plan.workers, 10, "the workers take no messages")
        killer = Killer(plan, witness, mail, workers)
        ends_at = time.monotonic() + plan.at_most
        with start_in_process(send, plan, str(folder), settings=settings) as sending:
            while sending.running or not broker.is_drained(plan.workers):
                killer.strike()
                if time.monotonic() > ends_at:
                    break
            sending.result(0)
        messages = broker.messages()
    flags = Person.everyone.using(alias).values_list("pk", tasks.FLAG)
    return History.read(plan, witness, dict(flags), messages)


def send(plan: Plan, folder: str) -> None:
    """Send the task of each user several times at once."""
    chance = random.Random(f"{plan.seed}:sends")
    task: Any = tasks.TASKS[plan.fault]
    for user in range(1, plan.users + 1):
        time.sleep(chance.expovariate(1 / plan.pause))
        for _ in range(plan.copies):
            task.delay(folder, user, plan.guarantee)


@contextmanager
def run_workers(plan: Plan, settings: dict[str, Any]) -> Iterator[list[CeleryWorker]]:
    """Start the workers at once; gives them when all are ready."""
    workers = [
        CeleryWorker(
            "tests.app",
            concurrency=plan.concurrency,
            arguments=["--include", tasks.__name__, "--prefetch-multiplier", str(PREFETCH)],
            settings=settings,
        )
        for _ in range(plan.workers)
    ]
    with ExitStack() as stack:
        for worker in workers:
            stack.push(worker)
        with ThreadPoolExecutor(plan.workers) as starters:
            list(starters.map(CeleryWorker.start, workers))
        yield workers


class Killer:
    """Kills children of the workers with SIGKILL: those whose e-mail is announced, and others."""

    def __init__(
        self, plan: Plan, witness: Witness, mail: MailServer, workers: Sequence[CeleryWorker]
    ) -> None:
        self._plan, self._witness, self._mail, self._workers = plan, witness, mail, workers
        self._random = random.Random(f"{plan.seed}:kills")
        self._due = self._next()

    def _next(self) -> float:
        return time.monotonic() + self._random.uniform(*self._plan.between_kills)

    def strike(self) -> None:
        """Kill whose e-mail was announced, or anybody if it is time for that."""
        patience = min(0.1, max(0.0, self._due - time.monotonic()))
        with suppress(Empty):
            run = self._mail.announced.get(timeout=patience)
            self._kill(int(run.partition("-")[0]), "announced")
        if time.monotonic() > self._due:
            self._due = self._next()
            children = self._random.choice(self._workers).children()
            if children:
                self._kill(self._random.choice(children).pid, "at random")

    def _kill(self, pid: int, why: str) -> None:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.ppid() in {worker.pid for worker in self._workers}:
                process.kill()
                self._witness.kills.write("killed", child=pid, why=why)
