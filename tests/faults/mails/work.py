"""The task that sends an e-mail once, and others that do it wrong."""

import os
import random
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from smtplib import SMTPException
from typing import Any, Final, get_args

from celery import shared_task
from django.core.mail import send_mail
from django.db import transaction

from django_celery_safe import SafeTask
from django_celery_safe.idempotency.flags import Guarantee
from tests.app.models import Person
from tests.faults.mails.plan import Witness

FLAG: Final = "is_welcome_email_sent"

#: Longest time between the answer of the mail server and the end of a block, s.
LINGER: Final = 0.05

OPTIONS: Any = {
    "base": SafeTask,
    "autoretry_for": (SMTPException, OSError),
    "default_retry_delay": 0.2,
    "max_retries": 1000,
    "acks_late": True,
    "reject_on_worker_lost": True,
}


class Run:
    """One run of a task for a user, with an id that its e-mail carries."""

    def __init__(self, folder: str, user: int) -> None:
        self.user = user
        self._id = f"{os.getpid()}-{uuid.uuid4().hex}"
        self._journal = Witness(Path(folder)).tasks

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
        """Send the e-mail, and note what the mail server said."""
        self._note("begun")
        try:
            send_mail("Welcome", self._id, "us@example.org", [person.email])
        except (SMTPException, OSError) as error:
            self._note("failed", error=type(error).__name__)
            raise
        self._note("answered")
        time.sleep(random.uniform(0, LINGER))

    def _note(self, what: str, **details: Any) -> None:
        self._journal.write(what, run=self._id, user=self.user, **details)


def send_once(folder: str, user_id: int, guarantee: Guarantee) -> None:
    """Send under ``do_once``."""
    run = Run(folder, user_id)
    with run.noted(), Person.do_once(user_id, FLAG, guarantee=guarantee) as user:
        if user:
            run.welcome(user)


@shared_task(**OPTIONS)
def send_welcome_email(folder: str, user_id: int, guarantee: Guarantee) -> None:
    """Welcome a user, once."""
    send_once(folder, user_id, guarantee)


@shared_task(**OPTIONS)
def send_plainly(folder: str, user_id: int, guarantee: Guarantee) -> None:
    """Read the flag, send, save."""
    run = Run(folder, user_id)
    with run.noted():
        user = Person.everyone.get(pk=user_id)
        if not user.is_welcome_email_sent:
            run.welcome(user)
            user.is_welcome_email_sent = True
            user.save()


@shared_task(**OPTIONS)
def send_and_flag_last(folder: str, user_id: int, guarantee: Guarantee) -> None:
    """Lock the row as ``do_once`` does, but set the flag after the commit."""
    run = Run(folder, user_id)
    with run.noted():
        with transaction.atomic():
            user = Person.everyone.select_for_update().get(pk=user_id)
            if user.is_welcome_email_sent:
                return
            run.welcome(user)
        Person.everyone.filter(pk=user_id).update(is_welcome_email_sent=True)


@shared_task(**OPTIONS)
def send_with_other_guarantee(folder: str, user_id: int, guarantee: Guarantee) -> None:
    """Welcome a user, once, and fail the other way."""
    (other,) = set(get_args(Guarantee)) - {guarantee}
    send_once(folder, user_id, other)


TASKS: dict[str, Callable[..., Any]] = {
    "": send_welcome_email,
    "plain": send_plainly,
    "flag-last": send_and_flag_last,
    "other-guarantee": send_with_other_guarantee,
}
