"""The sample feeds that come with the site, so that there is something to import offline."""

from __future__ import annotations

from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent / "samples"

RSS: Final = "application/rss+xml; charset=utf-8"
ATOM: Final = "application/atom+xml; charset=utf-8"

#: File name and content type of each.
CONTENT_TYPES: Final = {
    "harbour-notes.rss": RSS,
    "night-baker.rss": RSS,
    "tin-roof-weather.atom": ATOM,
    "slow-trains.atom": ATOM,
}


def read(name: str) -> bytes:
    """
    Return a sample feed.

    Raises:
        KeyError: There is none of that name.
    """
    if name not in CONTENT_TYPES:
        raise KeyError(name)
    return (FOLDER / name).read_bytes()
