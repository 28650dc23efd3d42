"""Functions that make any text storable in the tables."""

from __future__ import annotations

from typing import Final

#: Characters of an error, of its type, and of the end of its traceback, that a row keeps.
LONGEST_ERROR: Final = 1000
LONGEST_TYPE: Final = 255
LONGEST_TRACEBACK: Final = 4000


def storable(text: str, longest: int = LONGEST_ERROR) -> str:
    """Return a text that every database can store, cut to ``longest`` characters."""
    cut = text[:longest].replace("\0", "\N{REPLACEMENT CHARACTER}")
    return cut.encode("utf-8", "replace").decode("utf-8")


def end_of_traceback(text: str) -> str:
    """Return the end of a traceback as a row keeps it."""
    return storable(text[-LONGEST_TRACEBACK:], LONGEST_TRACEBACK)
