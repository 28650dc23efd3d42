"""Makes texts of any origin storable in the tables."""

from __future__ import annotations

from typing import Final

#: Characters of an error that a row keeps.
LONGEST_ERROR: Final = 1000


def storable(text: str, longest: int = LONGEST_ERROR) -> str:
    """Return a text that every database can keep, cut to so many characters."""
    cut = text[:longest].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return cut.encode("utf-8", "replace").decode("utf-8")
