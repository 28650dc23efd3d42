"""Twenty clicks on one import button at the same time: one message, and nineteen are told so."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any, Final

from celery import signals
from django.db import connections
from django.test import Client
from django.urls import reverse

from demo.promises import Promise, counted
from demo.surroundings import Surroundings
from django_celery_safe import iter_locks
from feeds.tasks import import_feed

CLICKS: Final = 20
FEED: Final = "harbour-notes.rss"
#: Longest run of the import, s.
ENDS_WITHIN: Final = 20.0


def play(around: Surroundings) -> Iterator[Promise]:
    """
    Press a feed's import button twenty times at once, and once more when it is done.

    The feed server lets the import wait until all have pressed, so that it goes on
    for all of them. What is counted is what Celery published.
    """
    around.display.scene(f"{CLICKS} clicks at once on the import button of one feed")
    around.feeds.hold(FEED)
    with _published() as sent:
        pages = _click_at_once(around)
    around.feeds.release(FEED)
    _wait_for_the_end(around)
    with _published() as sent_afterwards:
        _click(around.feeds.url(FEED))
    _wait_for_the_end(around)

    told = [page for page in pages if any(f"on its way already, as task {i}" in page for i in sent)]
    yield counted(f"Messages sent for {CLICKS} clicks at once", 1, len(sent))
    yield counted("Clicks told that it is on its way, and its id", CLICKS - 1, len(told))
    yield counted("Messages sent for a click when it was done", 1, len(sent_afterwards))


def _click_at_once(around: Surroundings) -> list[str]:
    """Return the pages that those who clicked see."""
    together = Barrier(CLICKS)

    def click(_: int) -> str:
        together.wait()
        try:
            return _click(around.feeds.url(FEED))
        finally:
            connections.close_all()

    pages = []
    with ThreadPoolExecutor(CLICKS) as visitors:
        for page in visitors.map(click, range(CLICKS)):
            pages.append(page)
            around.display.progress("clicks", len(pages), CLICKS)
    return pages


def _click(url: str) -> str:
    """Press the import button; return the page that follows."""
    return Client().post(reverse("feeds:import"), {"url": url}, follow=True).text


@contextmanager
def _published() -> Iterator[list[str]]:
    """Collect the ids of the imports that this process gives to the broker."""
    ids: list[str] = []

    def note(headers: dict[str, Any], **_: Any) -> None:
        ids.append(headers["id"])

    signals.after_task_publish.connect(note, sender=import_feed.name, weak=False)
    try:
        yield ids
    finally:
        signals.after_task_publish.disconnect(note, sender=import_feed.name)


def _wait_for_the_end(around: Surroundings) -> None:
    around.worker.wait_until(
        lambda: not list(iter_locks()), "the import had ended", seconds=ENDS_WITHIN
    )
