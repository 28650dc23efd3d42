"""The background tasks of accounts."""

from __future__ import annotations

from smtplib import SMTPException

from celery import shared_task
from django.conf import settings
from django.db import OperationalError

from django_celery_safe import SafeTask

from .models import User

WELCOME = """\
Hello {name},

good to have you here. This e-mail comes once: however often its message is
delivered, and however often the mail server says "later".
"""


PASSWORD_CHANGED = """\
Hello {name},

your password was changed. If that was not you, tell us.
"""


@shared_task(base=SafeTask, outbox="until_done")
def send_password_changed_email(user_id: int) -> None:
    """
    Tell a user that their password was changed.

    A user does not expect this e-mail, so a lost one would go unseen. The outbox keeps the task
    until it is done, even if the broker forgets the message or a process is killed. Better twice
    than never.
    """
    user = User.objects.get(pk=user_id)
    user.email_user("Your password was changed", PASSWORD_CHANGED.format(name=user.get_username()))


@shared_task(
    base=SafeTask,
    outbox=True,
    autoretry_for=(SMTPException, OSError, OperationalError),
    default_retry_delay=settings.MAIL_RETRY_DELAY,
    max_retries=120,
    acks_late=True,
    reject_on_worker_lost=True,
)
def send_welcome_email(user_id: int) -> None:
    """Send the welcome e-mail to a user who has not had it yet."""
    with User.do_once(user_id, "is_welcome_email_sent") as user:
        if user:  # None: sent already
            user.email_user("Welcome", WELCOME.format(name=user.get_username()))
