"""The welcome e-mail: a plain message, whose work is done once."""

from smtplib import SMTPException

from celery import shared_task
from django.conf import settings
from django.db import OperationalError

from .models import User

WELCOME = """\
Hello {name},

good to have you here. This e-mail comes once: however often its message is
delivered, and however often the mail server says "later".
"""


@shared_task(
    autoretry_for=(SMTPException, OSError, OperationalError),
    default_retry_delay=settings.MAIL_RETRY_DELAY,
    max_retries=120,
    acks_late=True,
    reject_on_worker_lost=True,
)
def send_welcome_email(user_id: int) -> None:
    """Send the welcome e-mail to a user who has not had it yet: the flag on their row says so."""
    with User.do_once(user_id, "is_welcome_email_sent") as user:
        if user:  # None: sent already
            user.email_user("Welcome", WELCOME.format(name=user.get_username()))
