"""Senders killed between the commit and the broker: the outbox has what they did not send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from io import StringIO
from typing import Final

from django.core.management import call_command
from rich.text import Text

from accounts.models import User
from accounts.tasks import send_welcome_email
from demo import senders
from demo.promises import Promise, counted
from demo.relay import relaying
from demo.surroundings import Surroundings
from django_celery_safe.models import OutboxMessage

#: People whose sender is killed right after the commit, and right after the publication.
UNSENT: Final = ("ann", "ben")
UNSETTLED: Final = ("cleo", "dan")
#: Killed like the first two, but without the outbox.
LOST: Final = ("eve", "fay")
#: Longest wait for the relay, s: it takes what a dead sender left after 5 s and
#: ``OUTBOX_SEND_TIMEOUT``.
RELAYED_WITHIN: Final = 30.0


def play(around: Surroundings) -> Iterator[Promise]:
    """
    Kill six processes that sign somebody up, two at each of three moments; start a relay.

    The senders without the outbox are killed before the publication, like the first two.
    """
    around.display.scene("Six processes killed between a commit and the broker")
    killed = 0
    for names, moment, outbox in (
        (UNSENT, senders.BEFORE, True),
        (UNSETTLED, senders.AFTER, True),
        (LOST, senders.BEFORE, False),
    ):
        senders.sign_up_and_die(names, moment=moment, outbox=outbox)
        killed += len(names)
        around.display.progress("sign-ups committed, their processes killed", killed, 6)
    around.display.note(Text("$ manage.py celery_outbox status\n" + _status(), "dim"))
    kept = OutboxMessage.objects.pending().count()
    with relaying():
        around.worker.wait_until(
            lambda: _is_over(around), "the relay had sent what was left", seconds=RELAYED_WITHIN
        )
    yield from _compare(around, kept)


def _status() -> str:
    """Return what ``manage.py celery_outbox status`` prints of the site's database."""
    printed = StringIO()
    call_command("celery_outbox", "status", "--database", "default", stdout=printed)
    return printed.getvalue()


def _is_over(around: Surroundings) -> bool:
    """Tell whether the outbox is empty, and each of its messages was done."""
    done = len(_runs(around, UNSENT)), len(_runs(around, UNSETTLED))
    around.display.progress("messages relayed and done", done[0], len(UNSENT))
    around.display.progress("messages done, twice each", done[1], 2 * len(UNSETTLED))
    left = OutboxMessage.objects.count()
    return not left and done[0] >= len(UNSENT) and done[1] >= 2 * len(UNSETTLED)


def _compare(around: Surroundings, kept: int) -> Iterator[Promise]:
    saved = User.objects.filter(username__in=(*UNSENT, *UNSETTLED, *LOST)).count()
    accepted = around.mail.accepted
    mailed = {name: accepted[senders.address(name)] for name in (*UNSENT, *UNSETTLED, *LOST)}
    twice = Counter(_runs(around, UNSETTLED)).values()
    yield counted("Sign-ups committed, their processes killed", 6, saved)
    yield counted("Messages of theirs in the outbox", len(UNSENT) + len(UNSETTLED), kept)
    yield counted("Killed before the publication: e-mails", len(UNSENT), _sum(mailed, UNSENT))
    yield counted(
        "Killed after it: messages done twice", len(UNSETTLED), sum(times == 2 for times in twice)
    )
    yield counted("Killed after it: e-mails", len(UNSETTLED), _sum(mailed, UNSETTLED))
    yield counted("Killed before it, without outbox: e-mails", 0, _sum(mailed, LOST))
    yield counted("Messages left in the outbox", 0, OutboxMessage.objects.count())


def _sum(counts: dict[str, int], names: tuple[str, ...]) -> int:
    return sum(counts[name] for name in names)


def _runs(around: Surroundings, names: tuple[str, ...]) -> list[str]:
    """Return the task id of each run, that has ended, of these people's welcome e-mails."""
    users = set(User.objects.filter(username__in=names).values_list("pk", flat=True))
    runs = around.journal.runs(send_welcome_email.name)
    return [run.task_id for run in runs if run.state == "SUCCESS" and run.arguments[0] in users]
