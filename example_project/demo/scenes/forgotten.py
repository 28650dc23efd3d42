"""Messages that the broker forgets, and a killed process: carried tasks are done all the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import StringIO
from time import monotonic
from typing import Final

from django.conf import settings
from django.core.management import call_command
from rich.text import Text

from accounts.models import User
from accounts.registration import change_password
from demo.promises import Promise, counted
from demo.relay import relaying
from demo.surroundings import Surroundings, forget_messages
from django_celery_safe.models import OutboxMessage

#: How many messages the broker forgets.
FORGOTTEN: Final = 10
#: The user whose e-mail is being sent when the process is killed.
KILLED: Final = "lou"
#: Longest wait for one step of this scene, s.
STEP_WITHIN: Final = 30.0
#: How much later than the lease's end the task may begin again, s: the relay has to look, and
#: the worker to start another child.
GRACE: Final = 5.0


def play(around: Surroundings) -> Iterator[Promise]:
    """
    Empty the broker while the worker stands still, then kill a process that sends an e-mail.

    The task has neither ``acks_late`` nor retries: its row in the outbox, which stays until it
    is done, is all that brings it back.
    """
    around.display.scene("A broker that forgets its messages, and a process killed with its own")
    forgetful = [_user(f"user{number}") for number in range(FORGOTTEN)]
    killed = _user(KILLED)
    with around.worker.standing_still():
        for user in forgetful:
            change_password(user, "changed")
        lost = forget_messages()
    around.display.progress("messages deleted from the broker", lost, FORGOTTEN)
    with relaying():
        _wait(around, "e-mails of forgotten messages", lambda: _mailed(around, forgetful))
        around.mail.hold(killed.email)
        change_password(killed, "changed")
        _wait(around, "an e-mail being sent", lambda: around.mail.met_hold[killed.email])
        around.display.note(Text("$ manage.py celery_outbox list\n" + _outbox(), "dim"))
        child = around.worker.child(_running_pid())
        child.kill()
        killed_at = monotonic()
        around.display.note(f"  SIGKILL to process {child.pid}")
        _wait(around, "e-mail cut off", lambda: around.mail.cut_off[killed.email])
        _wait(around, "e-mail being sent again", lambda: around.mail.met_hold[killed.email] - 1)
        pause = monotonic() - killed_at
        around.mail.release(killed.email)
        _wait(around, "e-mail sent after all", lambda: _mailed(around, [killed]))
        _wait(around, "outbox empty", lambda: int(not OutboxMessage.objects.exists()))
    yield from _compare(around, forgetful, killed, lost, pause)


def _user(name: str) -> User:
    return User.objects.create_user(name, f"{name}@example.com")


def _mailed(around: Surroundings, users: list[User]) -> int:
    return sum(around.mail.accepted[user.email] for user in users)


def _wait(around: Surroundings, what: str, count: Callable[[], int]) -> None:
    total = FORGOTTEN if "forgotten" in what else 1

    def is_over() -> bool:
        around.display.progress(what, min(count(), total), total)
        return count() >= total

    around.worker.wait_until(is_over, what, seconds=STEP_WITHIN)


def _outbox(*arguments: str) -> str:
    """Return what ``manage.py celery_outbox list`` prints."""
    printed = StringIO()
    call_command("celery_outbox", "list", "--database", "default", *arguments, stdout=printed)
    return printed.getvalue()


def _running_pid() -> int:
    """Return which process ``celery_outbox show`` names, of the only message whose task runs."""
    printed = StringIO()
    pk = str(OutboxMessage.objects.running().get().pk)
    call_command("celery_outbox", "show", pk, "--database", "default", "--json", stdout=printed)
    process: str = json.loads(printed.getvalue())["process"]
    return int(process.removeprefix("process ").split()[0])


def _compare(
    around: Surroundings, forgetful: list[User], killed: User, lost: int, pause: float
) -> Iterator[Promise]:
    lease = settings.DJANGO_CELERY_SAFE["LOCK_TIMEOUT"]
    yield counted("Messages that the broker forgot", FORGOTTEN, lost)
    yield counted(
        "Carried tasks whose message is gone: e-mails", FORGOTTEN, _mailed(around, forgetful)
    )
    yield counted("Carried, killed while it sends: e-mails", 1, _mailed(around, [killed]))
    yield Promise(
        f"It begins again after the dead run's lease ({lease:g} s)",
        expected=f"at most {lease + GRACE:g} s later",
        seen=f"{pause:.1f} s later",
        kept=0 < pause <= lease + GRACE,
    )
    yield counted("Messages left in the outbox", 0, OutboxMessage.objects.count())
