"""Getting a feed over HTTP, and reading it: from a URL to plain data, without a database."""

from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final
from urllib.request import urlopen

import feedparser

#: Longest silence of a feed's server, s.
TIMEOUT: Final = 60
#: Largest feed that is read, bytes.
MAX_BYTES: Final = 5 * 1024 * 1024
#: Longest URL, title and guid, characters: those of the columns.
MAX_LENGTH: Final = 500
WEB: Final = ("http://", "https://")


class FeedError(Exception):
    """A feed could not be imported; the sentence names the URL and the reason."""


@dataclass(frozen=True)
class ParsedEntry:
    """One entry of a feed."""

    #: Identifies it among the feed's entries, the same on every import.
    guid: str
    title: str
    #: An http or https URL, or empty.
    link: str


def fetch(url: str) -> tuple[str, list[ParsedEntry]]:
    """
    Return a feed's title and its entries; entries without anything to know them by are left out.

    A site on the open internet would also refuse addresses of its own network here.

    Raises:
        FeedError: The URL, the server's answer or the feed is not valid.
    """
    if not url.startswith(WEB):
        raise FeedError(f"{url}: only http:// and https:// URLs are fetched")
    try:
        with urlopen(url, timeout=TIMEOUT) as response:  # noqa: S310 - the scheme was checked
            # As a stream: feedparser takes a plain string for a URL or a file name.
            parsed = feedparser.parse(BytesIO(response.read(MAX_BYTES)))
    except (OSError, ValueError) as error:
        raise FeedError(f"{url}: no answer ({error})") from error
    if not parsed.version:
        raise FeedError(f"{url}: the answer is neither RSS nor Atom")
    entries = [_read(entry) for entry in parsed.entries]
    return _cut(parsed.feed.get("title")) or url, [entry for entry in entries if entry.guid]


def _read(entry: Any) -> ParsedEntry:
    link = _cut(entry.get("link"))
    guid = _cut(entry.get("id")) or link or _cut(entry.get("title"))
    # It becomes an href: a javascript: link from a stranger must not.
    return ParsedEntry(guid, _cut(entry.get("title")) or guid, link if link.startswith(WEB) else "")


def _cut(text: str | None) -> str:
    return " ".join((text or "").split())[:MAX_LENGTH]
