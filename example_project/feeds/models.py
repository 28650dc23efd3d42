"""Feeds and their entries."""

from __future__ import annotations

from dataclasses import asdict

from django.db import models, transaction
from django.utils import timezone

from .fetching import MAX_URL_LENGTH, fetch
from .parsing import MAX_LENGTH, ParsedEntry, parse


class FeedManager(models.Manager["Feed"]):
    """Feeds, and the way they come in."""

    def import_feed(self, feed_url: str) -> Feed:
        """
        Fetch a feed and save it with its entries.

        It may be imported again: entries are known by their guid, and changed
        ones are updated. Two imports of one feed at the same time would fetch
        it twice; :func:`feeds.tasks.import_feed` keeps that from happening.

        Raises:
            FeedError: It could not be fetched or is no feed; nothing is saved.
        """
        parsed = parse(fetch(feed_url))
        with transaction.atomic():
            values = {"title": parsed.title, "imported_at": timezone.now()}
            feed, _ = self.update_or_create(url=feed_url, defaults=values)
            for entry in parsed.entries:
                feed.save_entry(entry)
        return feed


class Feed(models.Model):
    """A feed that was imported at least once."""

    url = models.URLField("URL", max_length=MAX_URL_LENGTH, unique=True)
    title = models.CharField(max_length=MAX_LENGTH)
    imported_at = models.DateTimeField("last imported")

    objects = FeedManager()

    class Meta:
        ordering = ["title", "pk"]

    def __str__(self) -> str:
        return self.title

    def save_entry(self, entry: ParsedEntry) -> None:
        """Save an entry: a new one, or the changes of one that is known by its guid."""
        values = asdict(entry)
        guid = values.pop("guid")
        self.entries.update_or_create(guid=guid, defaults=values)


class Entry(models.Model):
    """One entry of a feed."""

    feed = models.ForeignKey(Feed, on_delete=models.CASCADE, related_name="entries")
    guid = models.CharField(max_length=MAX_LENGTH)
    title = models.CharField(max_length=MAX_LENGTH)
    link = models.URLField(max_length=MAX_URL_LENGTH, blank=True)
    published_at = models.DateTimeField("published", null=True, blank=True)

    class Meta:
        ordering = [models.F("published_at").desc(nulls_last=True), "pk"]
        constraints = [
            models.UniqueConstraint(fields=["feed", "guid"], name="feeds_entry_once_in_a_feed"),
        ]
        verbose_name_plural = "entries"

    def __str__(self) -> str:
        return self.title
