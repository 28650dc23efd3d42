"""Importing a feed: asked for once, and never twice at a time. Mailing a digest: done once."""

from __future__ import annotations

from smtplib import SMTPException

from celery import shared_task
from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import OperationalError

from django_celery_safe import SafeTask, idempotent, single_instance

from . import digest
from .models import Feed


@shared_task(base=SafeTask, acks_late=True, reject_on_worker_lost=True)
@single_instance(key="{feed_url}", unique_until="end")
def import_feed(feed_url: str) -> str:
    """
    Import a feed, unless another worker is importing it at this moment.

    While its import is on its way or goes on, to send it once more sends nothing,
    and gives the result of the first, marked as ``is_duplicate``.

    Returns:
        The feed's URL; None: it was skipped.
    """
    return Feed.objects.import_feed(feed_url).url


@shared_task(
    base=SafeTask,
    autoretry_for=(SMTPException, OSError, OperationalError),
    default_retry_delay=settings.MAIL_RETRY_DELAY,
    max_retries=120,
    acks_late=True,
    reject_on_worker_lost=True,
)
@idempotent(key="{user_id}:{day}")
def mail_digest(user_id: int, day: str) -> dict[str, int]:
    """
    Mail a user the digest of a day, which they have not had yet.

    There is no row for a user and a day, whose flag could say that it was sent; and
    nothing is locked while the mail server takes its time.

    Returns:
        How many entries were in it, also to whoever asks again.
    """
    user = get_user_model().objects.get(pk=user_id)
    entries = digest.newest_entries()
    user.email_user(f"Your feeds on {day}", digest.as_text(entries))
    return {"entries": len(entries)}
