"""Feeds and their entries."""

from __future__ import annotations

from django.db import models, transaction

from .fetching import MAX_LENGTH, fetch


class FeedManager(models.Manager["Feed"]):
    """Feeds, and the way they come in."""

    def import_feed(self, feed_url: str) -> Feed:
        """
        Fetch a feed and save it with its entries, which are known by their guid.

        Two imports of one feed at the same time would fetch it twice;
        :func:`feeds.tasks.import_feed` keeps that from happening.

        Raises:
            FeedError: It could not be fetched or is no feed; nothing is saved.
        """
        title, entries = fetch(feed_url)
        with transaction.atomic():
            feed, _ = self.update_or_create(url=feed_url, defaults={"title": title})
            for entry in entries:
                values = {"title": entry.title, "link": entry.link}
                feed.entries.update_or_create(guid=entry.guid, defaults=values)
        return feed


class Feed(models.Model):
    """A feed that was imported at least once."""

    url = models.URLField("URL", max_length=MAX_LENGTH, unique=True)
    title = models.CharField(max_length=MAX_LENGTH)
    imported_at = models.DateTimeField("last imported", auto_now=True)

    objects = FeedManager()

    class Meta:
        ordering = ["title", "pk"]

    def __str__(self) -> str:
        return self.title


class Entry(models.Model):
    """One entry of a feed."""

    feed = models.ForeignKey(Feed, on_delete=models.CASCADE, related_name="entries")
    guid = models.CharField(max_length=MAX_LENGTH)
    title = models.CharField(max_length=MAX_LENGTH)
    link = models.URLField(max_length=MAX_LENGTH, blank=True)

    class Meta:
        ordering = ["-pk"]
        constraints = [
            models.UniqueConstraint(fields=["feed", "guid"], name="feeds_entry_once_in_a_feed")
        ]

    def __str__(self) -> str:
        return self.title
