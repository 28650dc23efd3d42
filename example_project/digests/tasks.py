"""The digest: one e-mail with the newest entries of all feeds, for each user and day."""

from smtplib import SMTPException

from celery import shared_task
from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import OperationalError
from django.utils import timezone

from django_celery_safe import idempotent
from feeds.models import Entry

#: Entries in a digest.
NEWEST = 10


@shared_task(
    autoretry_for=(SMTPException, OSError, OperationalError),
    default_retry_delay=settings.MAIL_RETRY_DELAY,
    max_retries=120,
    acks_late=True,
    reject_on_worker_lost=True,
)
@idempotent(key="{user_id}:{day}")
def mail_digest(user_id: int, day: str) -> dict[str, int]:
    """
    Mail a user the digest of a day, unless they have had it.

    There is no row for a user and a day, whose flag could say so; hence the key. Nothing is
    locked while the mail server takes its time.

    Returns:
        How many entries were in it; the same for every message of that user and day.
    """
    entries = Entry.objects.select_related("feed")[:NEWEST]
    lines = [f"{entry.title} ({entry.feed.title})\n{entry.link}" for entry in entries]
    user = get_user_model().objects.get(pk=user_id)
    user.email_user(f"Your feeds on {day}", "\n\n".join(lines) or "Nothing new.")
    return {"entries": len(lines)}


def send_digests() -> int:
    """Send the digest of today for everybody, as often as anybody likes; return how many."""
    users = get_user_model().objects.exclude(email="").values_list("pk", flat=True)
    return len([mail_digest.delay(pk, timezone.localdate().isoformat()) for pk in users])
