"""A feed's import that is requested forty times, and whose process is killed."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from celery import current_app
from django.db import connections
from django.test import Client
from django.urls import reverse

from demo.backstage import Promise, Show, count, soon
from demo.models import Run
from feeds.models import Entry
from feeds.tasks import import_feed

CLICKS = 20
#: Messages from somebody who does not have this site's code: by the task's name. So the site
#: can't know that they are duplicates before they meet the run.
STRANGERS = 20


def play(show: Show) -> Iterator[Promise]:
    """Let the web server keep the import waiting; kill the import; let the server answer."""
    show.begin(
        "1. One at a time: feeds/, @single_instance",
        "A button is pressed twenty times. Twenty imports of one feed would get in each "
        "other's way, and a lock that a killed process leaves behind would stop them all.",
    )
    feeds = show.feeds
    feeds.is_open.clear()
    pages = click_at_once(feeds.url)
    show.say(f"{CLICKS} visitors click on Import at once; the feed's server is slow")
    show.wait("a process of the worker fetches the feed", lambda: feeds.active)
    for _ in range(STRANGERS):
        current_app.send_task(import_feed.name, (feeds.url,))
    ended = Run.objects.filter(task=import_feed.name, state="SUCCESS")
    skipped = ended.filter(returned__isnull=True)
    show.wait(
        f"{STRANGERS} more messages, sent past the button, are skipped",
        lambda: skipped.count() == STRANGERS,
    )
    show.kill_named("celery_locks", "list")
    feeds.is_open.set()
    show.wait("the dead process's lease ends; the import begins again", lambda: feeds.started > 1)
    pause = show.since_kill()
    show.wait("the import is done", lambda: ended.filter(returned=feeds.url).exists())
    told = [page for page in pages if "is on its way already" in page]
    ids = {found[1] for page in pages if (found := re.search(r"as task ([\w-]+)", page))}
    yield count(f"Messages sent for {CLICKS} clicks at once", 1, len(ids))
    yield count("Clicks that are told so, with its id", CLICKS - 1, len(told))
    yield count("Messages skipped while the import runs", STRANGERS, skipped.count())
    yield soon("The killed import begins again", pause)
    yield count("Most fetches of the feed at the same time", 1, feeds.most_at_once)
    yield count("Entries of the feed, saved in the end", 6, Entry.objects.count())


def click_at_once(url: str) -> list[str]:
    """Return the pages that those who clicked see."""
    together = Barrier(CLICKS)

    def click(_: int) -> str:
        together.wait()
        try:
            return Client().post(reverse("feeds:list"), {"url": url}, follow=True).text
        finally:
            connections.close_all()

    with ThreadPoolExecutor(CLICKS) as visitors:
        return list(visitors.map(click, range(CLICKS)))
