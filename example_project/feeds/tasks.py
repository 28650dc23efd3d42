"""Importing a feed in the background, never the same feed twice at a time."""

from __future__ import annotations

from celery import shared_task

from django_celery_safe import SafeTask, single_instance

from .models import Feed


@shared_task(base=SafeTask, acks_late=True, reject_on_worker_lost=True)
@single_instance(key="{feed_url}")
def import_feed(feed_url: str) -> str:
    """
    Import a feed, unless another worker is importing it at this moment.

    Returns:
        The feed's URL; None if it was skipped.
    """
    return Feed.objects.import_feed(feed_url).url
