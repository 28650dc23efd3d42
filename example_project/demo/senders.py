"""
Processes that sign somebody up and are killed on the way to the broker.

Each is a program of its own, ``python -m demo.senders <name> <moment> <outbox>``, which
kills itself by SIGKILL: no handler runs, nothing is written or closed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from django.conf import settings

from .errors import DemoError

#: The two moments between a commit and the deletion of its row.
BEFORE: Final = "before-publication"
AFTER: Final = "after-publication"
#: Longest life of a sender, s.
DIES_WITHIN: Final = 40.0


def sign_up_and_die(names: Sequence[str], *, moment: str, outbox: bool) -> None:
    """
    Let a process of its own sign each of these people up, all at once, and be killed.

    Args:
        names: Their user names.
        moment: When the processes are killed: :data:`BEFORE` or :data:`AFTER`.
        outbox: Whether the welcome e-mails go through the outbox.

    Raises:
        DemoError: One of the processes was not killed.
    """
    program = (sys.executable, "-m", "demo.senders")
    senders = [
        subprocess.Popen(
            (*program, name, moment, "outbox" if outbox else "plain"), cwd=settings.BASE_DIR
        )
        for name in names
    ]
    for name, sender in zip(names, senders, strict=True):
        if sender.wait(DIES_WITHIN) != -signal.SIGKILL:
            raise DemoError(f"The process that signs up {name} ended with {sender.returncode}.")


def main(name: str, moment: str, way: str) -> None:
    """Sign up one person, and be killed."""
    import django

    django.setup()
    from celery.signals import after_task_publish
    from django.db import transaction

    from accounts.models import User
    from accounts.tasks import send_welcome_email

    with transaction.atomic():
        if moment == BEFORE:
            # The first callback of this commit; the one that publishes comes after it.
            transaction.on_commit(_killer())
        user = User.objects.create_user(name, address(name))
        send_welcome_email.apply_async_on_commit((user.pk,), outbox=way == "outbox")
        if moment == AFTER:
            after_task_publish.connect(_killer(), weak=False)


def address(name: str) -> str:
    """Return the e-mail address of the person of this name."""
    return f"{name}@example.com"


def _killer() -> Callable[..., None]:
    def kill(**_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return kill


if __name__ == "__main__":
    main(*sys.argv[1:])
