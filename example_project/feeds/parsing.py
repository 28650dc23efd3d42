"""Reading RSS and Atom: from the bytes of a document to plain data, without a database."""

from __future__ import annotations

from calendar import timegm
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from io import BytesIO
from time import struct_time
from typing import Any, Final

import feedparser

from .errors import NotAFeed
from .fetching import MAX_URL_LENGTH, Document

#: Longest title and guid, characters: those of the columns.
MAX_LENGTH: Final = 500


@dataclass(frozen=True)
class ParsedEntry:
    """One entry of a feed."""

    #: Identifies it among the feed's entries, the same on every import.
    guid: str
    title: str
    #: An http or https URL, or empty.
    link: str
    published_at: datetime | None


@dataclass(frozen=True)
class ParsedFeed:
    """A feed with its entries, each guid once."""

    title: str
    entries: list[ParsedEntry]


def parse(document: Document) -> ParsedFeed:
    """
    Read a feed in any version of RSS or Atom.

    Entries with nothing to tell them by (no id, link or title) are left out.

    Raises:
        NotAFeed: It is something else, or too broken to find an entry in.
    """
    # As a stream: feedparser takes a plain string for a URL or a file name.
    parsed = feedparser.parse(
        BytesIO(document.body),
        response_headers={
            "content-type": document.content_type,
            "content-location": document.url,
        },
    )
    if not parsed.version or (parsed.bozo and not parsed.entries):
        raise NotAFeed(document.url, _describe(document, parsed))
    entries = [read for entry in parsed.entries if (read := _read_entry(entry)) is not None]
    title = _cut(parsed.feed.get("title", "")) or document.url
    return ParsedFeed(title, list({entry.guid: entry for entry in entries}.values()))


def _describe(document: Document, parsed: Any) -> str:
    if not document.body.strip():
        return "the answer is empty"
    if parsed.version:
        return f"broken {parsed.version}: {parsed.bozo_exception}"
    kind = document.content_type.partition(";")[0] or "no content type"
    return f"no feed; the answer is {kind}, and neither RSS nor Atom was found in it"


def _read_entry(entry: Any) -> ParsedEntry | None:
    title = _cut(entry.get("title", ""))
    link = _web_link(entry.get("link", ""))
    guid = _fit(entry.get("id") or entry.get("link") or title)
    if not guid:
        return None
    published = entry.get("published_parsed") or entry.get("updated_parsed")
    return ParsedEntry(guid, title or link or guid, link, _moment(published))


def _cut(text: str) -> str:
    # PostgreSQL takes no NUL character.
    return " ".join(text.replace("\0", "").split())[:MAX_LENGTH]


def _fit(guid: str) -> str:
    guid = guid.replace("\0", "").strip()
    return guid if len(guid) <= MAX_LENGTH else sha256(guid.encode()).hexdigest()


def _web_link(link: str) -> str:
    # It becomes an href: a javascript: link from a stranger must not.
    is_web = link.lower().startswith(("http://", "https://")) and len(link) <= MAX_URL_LENGTH
    return link.replace("\0", "") if is_web else ""


def _moment(parsed: struct_time | None) -> datetime | None:
    if parsed is None:
        return None
    try:
        return datetime.fromtimestamp(timegm(parsed), UTC)
    except (OverflowError, ValueError, OSError):
        return None  # a date beyond what Python can hold
