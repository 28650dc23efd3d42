"""``manage.py send_digests``"""

from typing import Any

from django.core.management.base import BaseCommand

from digests.tasks import send_digests


class Command(BaseCommand):
    """Hand everybody's digest to a worker: from cron, for example."""

    help = "Mail every user the digest of today, unless they have had it."

    def handle(self, **options: Any) -> None:
        self.stdout.write(f"{send_digests()} digest(s) were handed to the workers.")
