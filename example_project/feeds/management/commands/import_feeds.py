"""``manage.py import_feeds [URL…]``"""

from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from django_celery_safe import cache_lock
from feeds.models import Feed
from feeds.tasks import import_feed


class Command(BaseCommand):
    """Import feeds, here or in a worker."""

    help = "Import RSS and Atom feeds. A feed that is being imported elsewhere is skipped."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("urls", nargs="*", metavar="URL", help="All known feeds if left out.")
        parser.add_argument(
            "--send", action="store_true", help="Hand the imports to a worker and return at once."
        )

    def handle(self, *, urls: list[str], send: bool, **options: Any) -> None:
        import_one = self.send if send else self.import_here
        # A cron job may begin before the one before has ended.
        with cache_lock("import_feeds") as lock:
            if not lock:
                self.stdout.write("Skipped: another import_feeds is running.")
                return
            for url in urls or Feed.objects.values_list("url", flat=True):
                self.stdout.write(f"{url}: {import_one(url)}")

    def send(self, url: str) -> str:
        """Send the import of one feed, unless it is on its way."""
        sent = import_feed.delay(url)
        return f"{'on its way already, as' if sent.is_duplicate else 'sent as'} {sent.id}"

    def import_here(self, url: str) -> str:
        """Import one feed in this process, under the same lock as a worker."""
        imported = import_feed(url)
        return "imported" if imported else "skipped, it is being imported elsewhere"
