"""``manage.py import_feeds URL…``"""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from feeds.errors import FeedError
from feeds.models import Feed
from feeds.tasks import import_feed


class Command(BaseCommand):
    """Import feeds, here or in a worker."""

    help = "Import RSS and Atom feeds. A feed that is being imported elsewhere is skipped."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("urls", nargs="+", metavar="URL", help="The feed's http(s) URL.")
        parser.add_argument(
            "--send", action="store_true", help="Hand the imports to a worker and return at once."
        )

    def handle(self, *, urls: list[str], send: bool, **options: Any) -> None:
        import_one = self.send if send else self.import_here
        failed = [url for url in urls if not import_one(url)]
        if failed:
            raise CommandError(f"{len(failed)} of {len(urls)} feeds could not be imported.")

    def send(self, url: str) -> bool:
        """Send the import of one feed, unless it is on its way; print its task id."""
        sent = import_feed.delay(url)
        outcome = "on its way already, as" if sent.is_duplicate else "sent as"
        self.stdout.write(f"{url}: {outcome} {sent.id}")
        return True

    def import_here(self, url: str) -> bool:
        """Import one feed in this process, under the same lock as a worker; print what came."""
        try:
            imported = import_feed(url)
        except FeedError as error:
            self.stderr.write(self.style.ERROR(str(error)))
            return False
        if imported is None:
            self.stdout.write(f"{url}: skipped, it is being imported elsewhere")
            return True
        feed = Feed.objects.get(url=imported)
        self.stdout.write(f"{url}: {feed.title}, {feed.entries.count()} entries")
        return True
