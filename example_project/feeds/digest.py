"""The digest: one e-mail a day with the newest entries of all feeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from .models import Entry

#: Entries in a digest.
NEWEST: Final = 10


def newest_entries() -> list[Entry]:
    """Return what a digest is about."""
    return list(Entry.objects.select_related("feed")[:NEWEST])


def as_text(entries: Sequence[Entry]) -> str:
    """Return the body of the e-mail."""
    lines = [f"{entry.title} ({entry.feed.title})\n{entry.link}" for entry in entries]
    return "\n\n".join(lines) or "Nothing new."
