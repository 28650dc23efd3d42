"""Importing a feed: sent once, and never running twice at a time."""

from celery import shared_task

from django_celery_safe import single_instance

from .models import Feed


@shared_task(acks_late=True, reject_on_worker_lost=True)
@single_instance(key="{feed_url}", unique_until="end")
def import_feed(feed_url: str) -> str:
    """
    Import a feed, unless another worker is importing it at this moment.

    While its import waits or runs, sending it again sends nothing, and returns
    the result of the first send, marked as ``is_duplicate``.

    Returns:
        The feed's URL; None: the import was skipped.
    """
    return Feed.objects.import_feed(feed_url).url
