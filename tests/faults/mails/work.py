"""The task that sends an e-mail once, others that do it wrong, and the post that they use."""

import os
import random
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from smtplib import SMTPException, SMTPRecipientsRefused, SMTPServerDisconnected
from typing import Any, Final, get_args

from celery import shared_task
from django.core.mail import EmailMessage, send_mail
from django.core.mail.backends.base import BaseEmailBackend
from django.db import transaction

from django_celery_safe import SafeTask
from django_celery_safe.idempotency.flags import Guarantee
from tests.app.models import Person
from tests.faults.mails.oracle import Behaviour, Plan
from tests.faults.scenario import find_witness

FLAG: Final = "is_welcome_email_sent"

#: How often of so many times the post does each.
WEIGHTS: Final = {
    Behaviour.ACCEPT: 9,
    Behaviour.REFUSE: 2,
    Behaviour.KILL_EARLY: 1,
    Behaviour.DROP_ANSWER: 2,
    Behaviour.KILL: 2,
    Behaviour.KILL_LATE: 2,
}

OPTIONS: Any = {
    "base": SafeTask,
    "autoretry_for": (SMTPException,),
    "default_retry_delay": 0.2,
    "max_retries": 1000,
    "acks_late": True,
    "reject_on_worker_lost": True,
}


class Post(BaseEmailBackend):
    """An e-mail backend that misbehaves; an e-mail that it took is in its journal before."""

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        """Take the only e-mail, or not."""
        (message,), witness = email_messages, find_witness()
        (behaviour,) = random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        witness.open("post").write("asked", behaviour=behaviour)
        if behaviour is Behaviour.REFUSE:
            raise SMTPRecipientsRefused({})
        if behaviour is Behaviour.KILL_EARLY:
            die()
        witness.journal.write("behaviour", run=message.body, behaviour=behaviour)
        # As a slow server would, so that runs meet.
        time.sleep(random.uniform(0, 0.1))
        if behaviour is Behaviour.KILL:
            die()
        if behaviour is Behaviour.DROP_ANSWER:
            raise SMTPServerDisconnected
        Run.dies_now = behaviour is Behaviour.KILL_LATE
        return 1


def die() -> None:
    """Kill this process, and note that."""
    find_witness().trouble.write("killed", child=os.getpid(), what="by the post")
    os.kill(os.getpid(), signal.SIGKILL)


class Run:
    """One run of a task for a user, with an id that its e-mail carries."""

    #: Whether this process is to die when it has noted the answer of the post.
    dies_now = False

    def __init__(self, user: int) -> None:
        self.user = user
        self._id = f"{os.getpid()}-{uuid.uuid4().hex}"

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note that the block begins, and how it ends."""
        self._note("taken")
        try:
            yield
        except BaseException as error:
            self._note("over", error=type(error).__name__)
            raise
        self._note("over", error=None)

    def welcome(self, person: Person) -> None:
        """Send the e-mail, and note what the post said."""
        self._note("begun")
        try:
            send_mail("Welcome", self._id, "us@example.org", [person.email])
        except SMTPException as error:
            self._note("failed", error=type(error).__name__)
            raise
        self._note("answered")
        if self.dies_now:
            die()

    def _note(self, what: str, **details: Any) -> None:
        find_witness().journal.write(what, run=self._id, user=self.user, **details)


def send(plan: Plan) -> None:
    """Send the task of each user several times at once."""
    chance = random.Random(f"{plan.seed}:sends")
    for user in range(1, plan.users + 1):
        time.sleep(chance.expovariate(1 / plan.pause))
        for _ in range(plan.copies):
            TASKS[plan.broken].delay(user, plan.guarantee)


def send_once(user_id: int, guarantee: Guarantee) -> None:
    """Send under ``do_once``."""
    run = Run(user_id)
    with run.noted(), Person.do_once(user_id, FLAG, guarantee=guarantee) as user:
        if user:
            run.welcome(user)


@shared_task(**OPTIONS)
def send_welcome_email(user_id: int, guarantee: Guarantee) -> None:
    """Welcome a user, once."""
    send_once(user_id, guarantee)


@shared_task(**OPTIONS)
def send_plainly(user_id: int, guarantee: Guarantee) -> None:
    """Read the flag, send, save."""
    run = Run(user_id)
    with run.noted():
        user = Person.everyone.get(pk=user_id)
        if not user.is_welcome_email_sent:
            run.welcome(user)
            user.is_welcome_email_sent = True
            user.save()


@shared_task(**OPTIONS)
def send_and_flag_last(user_id: int, guarantee: Guarantee) -> None:
    """Lock the row as ``do_once`` does, but set the flag after the commit."""
    run = Run(user_id)
    with run.noted():
        with transaction.atomic():
            user = Person.everyone.select_for_update().get(pk=user_id)
            if user.is_welcome_email_sent:
                return
            run.welcome(user)
        Person.everyone.filter(pk=user_id).update(is_welcome_email_sent=True)


@shared_task(**OPTIONS)
def send_with_other_guarantee(user_id: int, guarantee: Guarantee) -> None:
    """Welcome a user, once, and fail the other way."""
    (other,) = set(get_args(Guarantee)) - {guarantee}
    send_once(user_id, other)


TASKS: dict[str, Any] = {
    "": send_welcome_email,
    "plain": send_plainly,
    "flag-last": send_and_flag_last,
    "other-guarantee": send_with_other_guarantee,
}
