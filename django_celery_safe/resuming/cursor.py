"""The cursor of some work: how far it got, as the row of its claim keeps it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple, Self

from ..exceptions import ConfigurationError
from ..leases.claim import Claim, current_claim, own_claims
from ..values import NotPlain, decode, encode

#: Longest cursor, characters of JSON: each checkpoint writes all of it.
LONGEST: Final = 4096


class Cursor(NamedTuple):
    """
    How far some work got.

    Attributes:
        of: What the work walks, such as ``shop.price by id``; None: it had other arguments, before
            a retry.
        at: Where it is: the last key, the next index, or what ``checkpoint()`` was given.
        done, total: How many items were done, and how many there were at the start; None: not
            known.
    """

    of: str | None
    at: Any = None
    done: int | None = None
    total: int | None = None

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Return the cursor that a row keeps; None: the row has none."""
        return cls(*decode(text)) if text else None

    def encode(self) -> str:
        """
        Return the text for a row.

        Raises:
            ConfigurationError: JSON can't represent it, or it is too long.
        """
        try:
            return encode([*self], LONGEST)
        except NotPlain as error:
            raise ConfigurationError(
                f"A cursor has to be a little plain data, and {self.at!r:.200} is not: {error}."
            ) from error

    @property
    def progress(self) -> str:
        """How far the work got, for people."""
        if self.done is None:
            return f"{self.at!r:.40}"
        return f"{self.done:,}" if self.total is None else f"{self.done:,}/{self.total:,}"


def begin_walk(of: str, what: str) -> tuple[Claim, Cursor | None]:
    """
    Return the claim under which the running code works, and the cursor that its run began with.

    Args:
        of: What the code walks; see :class:`Cursor`.
        what: The function that was called, for errors.

    Raises:
        ConfigurationError: The code has no claim, or walks something else as well; or the cursor
            is of something else.
        ClaimLost: The claim is no longer ours.
    """
    claim = current_claim()
    claim.check_unfinished()
    if not claim.walks:
        claim.place = claim.read_cursor()
        cursor = Cursor.read(claim.place)
        if cursor is not None and cursor.of != of:
            raise unfit(claim, cursor, f"the code walks {of}")
        claim.walks, claim.began_with = of, cursor
    elif claim.walks != of or what == "resumable()":
        raise ConfigurationError(
            f"{claim.key!r} has one cursor, that of {claim.walks}, and can't keep a second one, of "
            f"{of}. Put each loop into a task, or a step, of its own."
        )
    return claim, claim.began_with


def record(alias: str, cursor: Cursor) -> Claim | None:
    """Record a cursor of the running work; return the claim that is no longer ours, or None."""
    claim, text = current_claim(), cursor.encode()
    moved = text != claim.place  # otherwise a death is one without progress
    for one in own_claims():  # a message has a place of its own, beside that of a key inside it
        values = {"lease": one.seconds, "moved": moved, "cursor": text if one is claim else None}
        if one.table.alias == alias and not one.table.move(one.name, one.token, **values):
            return one
    claim.place = text
    return None


def unfit(claim: Claim, cursor: Cursor, why: str) -> ConfigurationError:
    """Return the error for a cursor that does not fit the code."""
    return ConfigurationError(
        f"The cursor of {claim.key!r} does not fit the code: it is at {cursor.at!r:.200} of "
        f"{cursor.of or 'other arguments'}, and {why}. Nothing was done. Undo the change, or "
        f"discard the message and send the task again, which begins anew."
    )
