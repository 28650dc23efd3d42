"""Sign-ups that commit or roll back, messages delivered twice, a mail server that says later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from django.db import transaction

from accounts.forms import SignUpForm
from accounts.models import User
from accounts.registration import register
from accounts.tasks import send_welcome_email
from demo.errors import DemoError
from demo.journal import Run
from demo.promises import Promise, counted
from demo.surroundings import Surroundings, undelivered

SIGN_UPS: Final = 50
#: Every fifth sign-up rolls back.
ROLLED_BACK_EVERY: Final = 5
ROLLED_BACK: Final = SIGN_UPS // ROLLED_BACK_EVERY
COMMITTED: Final = SIGN_UPS - ROLLED_BACK
#: Messages that are delivered a second time.
TWICE: Final = 10
#: E-mails that the mail server refuses before it accepts the first.
REFUSALS: Final = 15
#: Longest run of this scene, s.
ENDS_WITHIN: Final = 45.0


@dataclass(frozen=True)
class SignUp:
    """The outcome of one sign-up."""

    user_id: int
    email: str
    #: Id of the welcome e-mail's message, announced before the commit.
    task_id: str
    is_committed: bool


class PageFailed(Exception):
    """Stands for whatever goes wrong in a view once the user was saved."""


def play(around: Surroundings) -> Iterator[Promise]:
    """Let fifty people sign up, ten of them in vain; count the e-mails at the mail server."""
    around.display.scene(f"{SIGN_UPS} sign-ups, while the mail server says later")
    around.mail.refusals_left = REFUSALS
    sign_ups = list(_sign_all_up(around))
    around.worker.wait_until(
        lambda: _all_ended(around),
        f"the {COMMITTED + TWICE} messages of the welcome e-mail were done",
        seconds=ENDS_WITHIN,
    )
    yield from _compare(around, sign_ups)


def _sign_all_up(around: Surroundings) -> Iterator[SignUp]:
    seconds = 0
    for number in range(1, SIGN_UPS + 1):
        sign_up = _sign_up(number)
        if sign_up.is_committed and seconds < TWICE:
            # At once, so that the two may well run at the same time.
            send_welcome_email.apply_async((sign_up.user_id,), task_id=sign_up.task_id)
            seconds += 1
        yield sign_up
        around.display.progress(f"sign-ups, {ROLLED_BACK} of them rolled back", number, SIGN_UPS)


def _sign_up(number: int) -> SignUp:
    password = f"a long passphrase {number}"
    email = f"guest-{number}@example.com"
    form = SignUpForm(
        {
            "username": f"guest-{number}",
            "email": email,
            "password1": password,
            "password2": password,
        }
    )
    if not form.is_valid():
        raise DemoError(f"The sign-up form refused {email}: {form.errors.as_text()}")
    is_committed = number % ROLLED_BACK_EVERY != 0
    try:
        with transaction.atomic():
            user, message = register(form)
            if not is_committed:
                raise PageFailed
    except PageFailed:
        pass
    return SignUp(user.pk, email, message.id, is_committed)


def _all_ended(around: Surroundings) -> bool:
    ended = len(_ended(around))
    around.display.progress("e-mails refused for now", around.mail.refused, REFUSALS)
    around.display.progress("e-mails accepted", around.mail.accepted.total(), COMMITTED)
    around.display.progress(f"messages done, {TWICE} twice", ended, COMMITTED + TWICE)
    return ended >= COMMITTED + TWICE and not undelivered()


def _compare(around: Surroundings, sign_ups: list[SignUp]) -> Iterator[Promise]:
    accepted = around.mail.accepted
    committed = {s.email for s in sign_ups if s.is_committed}
    rolled_back = {s.task_id for s in sign_ups if not s.is_committed}
    runs_by_id = Counter(run.task_id for run in _ended(around))
    yield counted(
        "Sign-ups saved, and marked as welcomed",
        COMMITTED,
        User.objects.filter(is_welcome_email_sent=True).count(),
    )
    yield counted("E-mails that the mail server refused at first", REFUSALS, around.mail.refused)
    yield counted(
        "Messages delivered twice", TWICE, sum(times == 2 for times in runs_by_id.values())
    )
    yield counted("Welcome e-mails accepted", COMMITTED, accepted.total())
    yield counted("Users who got theirs", COMMITTED, len(committed & set(accepted)))
    yield counted("Most e-mails to one user", 1, max(accepted.values(), default=0))
    yield counted("E-mails for a sign-up rolled back", 0, len(set(accepted) - committed))
    yield counted("Messages sent for a sign-up rolled back", 0, len(rolled_back & set(runs_by_id)))


def _ended(around: Surroundings) -> list[Run]:
    """Return the last run of every message that is done with; a retry is not."""
    runs = around.journal.runs(send_welcome_email.name)
    return [run for run in runs if run.state != "RETRY"]
