"""
A process that is killed on its way to the broker: ``python -m demo.senders WHAT WHOM WHEN``.

It kills itself by SIGKILL: no handler runs, nothing is written or closed.
"""

import os
import signal
import sys
from typing import Any


def die(**_: Any) -> None:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(what: str, whom: str, when: str) -> None:
    """
    Save something with a message, and be killed.

    Args:
        what: ``sign-up`` or ``order``.
        whom: A name.
        when: ``uncommitted``, before the commit, or ``committed``, right after it.
    """
    import django

    django.setup()
    from django.db import transaction

    from accounts.models import User
    from accounts.tasks import send_welcome_email
    from orders.tasks import place_order

    with transaction.atomic():
        if when == "committed":
            # The first callback of this commit; the one that publishes comes after it.
            transaction.on_commit(die)
        if what == "order":
            place_order(f"{whom}@example.com")
        else:
            user = User.objects.create_user(whom, f"{whom}@example.com")
            send_welcome_email.delay_on_commit(user.pk)
        if when == "uncommitted":
            die()


if __name__ == "__main__":
    main(*sys.argv[1:])
