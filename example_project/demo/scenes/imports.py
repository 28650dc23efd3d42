"""Twenty deliveries of each feed's import at once: one fetches, the others are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from celery import current_app

from demo.journal import Run
from demo.promises import Promise, counted
from demo.surroundings import Surroundings
from feeds import bundled
from feeds.fetching import Document
from feeds.models import Entry, Feed
from feeds.parsing import parse
from feeds.tasks import import_feed

DELIVERIES: Final = 20
FEEDS: Final = ("harbour-notes.rss", "night-baker.rss", "tin-roof-weather.atom")
#: Longest run of this scene, s.
ENDS_WITHIN: Final = 40.0


def play(around: Surroundings) -> Iterator[Promise]:
    """
    Send every import twenty times, as a sender that does not have this site's code:
    by the task's name. So nothing is a duplicate before it meets the run.

    The feed server keeps a feed's first visitor waiting until the other
    nineteen deliveries have ended, so all of them meet a running import.
    """
    around.display.scene(f"{DELIVERIES} deliveries of the import of each of {len(FEEDS)} feeds")
    for name in FEEDS:
        around.feeds.hold(name)
    for _ in range(DELIVERIES):
        for name in FEEDS:
            current_app.send_task(import_feed.name, (around.feeds.url(name),))
    around.worker.wait_until(
        lambda: _release_the_waiting(around),
        f"all {len(FEEDS) * DELIVERIES} deliveries had ended",
        seconds=ENDS_WITHIN,
    )
    yield from _compare(around)


def _release_the_waiting(around: Surroundings) -> bool:
    """Release each feed whose other deliveries have ended; tell whether all have."""
    ended = {name: len(_runs(around, name)) for name in FEEDS}
    for name, count in ended.items():
        # Two at once: the promise is broken, and more visitors would fill up the worker.
        if count >= DELIVERIES - 1 or around.feeds.fetches(name).most_at_once > 1:
            around.feeds.release(name)
        around.display.progress(f"import of {name}", count, DELIVERIES)
    return all(count >= DELIVERIES for count in ended.values())


def _compare(around: Surroundings) -> Iterator[Promise]:
    seen = [around.feeds.fetches(name) for name in FEEDS]
    runs = [run for name in FEEDS for run in _runs(around, name)]
    skipped = sum(run.state == "SUCCESS" and run.returned is None for run in runs)
    yield Promise(
        f"Fetches of each feed, out of {DELIVERIES} deliveries",
        expected=", ".join("1" for _ in FEEDS),
        seen=", ".join(str(fetches.started) for fetches in seen),
        kept=all(fetches.started == 1 for fetches in seen),
    )
    yield counted("Most fetches of one feed at the same time", 1, max(f.most_at_once for f in seen))
    yield counted(
        "Deliveries skipped, as the import was running", len(FEEDS) * (DELIVERIES - 1), skipped
    )
    yield counted("Feeds in the database", len(FEEDS), Feed.objects.count())
    yield counted("Entries in the database", sum(map(entry_count, FEEDS)), Entry.objects.count())


def entry_count(name: str) -> int:
    """Return how many entries a bundled feed has."""
    document = Document(name, bundled.CONTENT_TYPES[name], bundled.read(name))
    return len(parse(document).entries)


def _runs(around: Surroundings, name: str) -> list[Run]:
    url = around.feeds.url(name)
    return [run for run in around.journal.runs(import_feed.name) if run.arguments == [url]]
