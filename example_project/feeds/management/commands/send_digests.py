"""``manage.py send_digests``"""

from __future__ import annotations

from datetime import date
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandParser
from django.utils import timezone

from feeds.tasks import mail_digest


class Command(BaseCommand):
    """Hand everybody's digest to a worker: from cron, say, as often as one likes."""

    help = "Mail every user the digest of a day. Who had it does not get it again."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--day", type=date.fromisoformat, help="Such as 2026-11-21; today if not given."
        )

    def handle(self, *, day: date | None, **options: Any) -> None:
        day = timezone.localdate() if day is None else day
        users = get_user_model().objects.filter(is_active=True).exclude(email="")
        sent = [mail_digest.delay(pk, day.isoformat()) for pk in users.values_list("pk", flat=True)]
        self.stdout.write(f"{len(sent)} digest(s) of {day} handed to the workers.")
