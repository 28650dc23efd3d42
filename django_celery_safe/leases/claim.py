"""
:class:`Claim`: a process's claim of one table row, and of the work that the row stands for.

Records and carried messages, such as those of steps, are claimed in the same way: see
``held_row``.
"""

from __future__ import annotations

from typing import Any, Final

from ..exceptions import ConfigurationError, InvalidResult, WrongTransaction
from ..values import NotPlain, encode
from .held_row import HeldRow

#: Longest result, characters of JSON: a repeat reads the whole result.
LONGEST_RESULT: Final = 65536


class Claim(HeldRow):
    """
    The exclusive right to do some work.

    :func:`idempotent` yields the claim of its key. In a task with ``outbox="until_done"``, and in
    a step, :func:`current_claim` returns the claim of the message or step. A claim is truthy if
    the work is ours to do, falsy if it is done.

    Attributes:
        key: The name of the work; for a message or a step ``<task>[<task id>]``.
        result: The result that :meth:`finish` recorded; None while the work is not done.
    """

    result: Any = None
    #: Whether the work had been done before.
    is_repeat = False
    #: What the work walks, such as ``shop.price by id``, and the cursor with which it began,
    #: see ``resuming``; "": it walks nothing. ``place`` is the last cursor that the row got.
    walks = place = ""
    began_with: Any = None

    def __bool__(self) -> bool:
        return self.is_held

    def __repr__(self) -> str:
        return f"<Claim {self.key!r}: {'ours' if self.is_held else 'not ours'}>"

    def finish(self, result: Any = None) -> None:
        """
        Record that the work is done; from then on a repeat gets ``result``.

        Inside ``atomic()`` on the claim's database, the record is committed together with the
        body's own writes there: both, or neither. Without this call, the work is recorded as
        done when the block, or the function, ends without an error.

        Args:
            result: Plain data that JSON can represent, at most 64 KB. In a step: a dict for the
                next stages, or None.

        Raises:
            ClaimLost: The claim is no longer ours, and nothing is recorded.
            InvalidResult: JSON can't represent the result, or it is too long; nothing is
                recorded.
            ConfigurationError: The work is not ours, or is already finished; or a loop of
                ``resumable()`` has a chunk open.
        """
        self.check_unfinished()
        if self.abandon_chunk is not None:
            raise ConfigurationError(
                f"{self.key!r} can't be finished inside its resumable() loop, whose chunk is not "
                f"complete. Finish it behind the loop."
            )
        self._record_done(self._encode(result))
        self.result = result

    def ensure(self) -> None:
        """
        Check with the database, in one query, that the claim is still ours.

        Call it before each step that two processes must not both do.

        Raises:
            ClaimLost: The claim is no longer ours.
            ConfigurationError: The work is not ours, or is finished.
        """
        self.check_unfinished()
        if not self._rows().claimed(self.token).exists():
            self.raise_lost()

    def check_committed(self) -> None:
        """
        Check that a claim that was finished was also committed.

        Raises:
            WrongTransaction: The transaction of :meth:`finish` was rolled back.
        """
        if not self.is_finished or self._is_committed:
            return
        if not self.is_done():
            self.is_finished = False
            raise WrongTransaction(
                f"{self.key!r} was finished in a transaction that was rolled back, so it counts "
                f"as not done. Don't catch the error that caused the rollback: let it propagate."
            )
        self._is_committed = True

    def is_done(self, *, patient: bool = True) -> bool:
        """Return whether the row says that this claim has finished the work."""
        rows, token = self._rows(), self.token
        return bool(self.ask(lambda: rows.is_done_by(token), patient=patient))

    def _encode(self, result: Any) -> str:
        """
        Return the text that is stored for a result; for None: "".

        Raises:
            InvalidResult: JSON can't represent the result, or it is too long.
        """
        try:
            return "" if result is None else encode(result, LONGEST_RESULT)
        except NotPlain as error:
            raise InvalidResult(self.key, str(error)) from error

    def read_cursor(self) -> str:
        """
        Return how far the work got, as the row keeps it; "": not at all.

        Raises:
            ClaimLost: The claim is no longer ours.
        """
        row = self._rows().claimed(self.token)
        found: str | None = row.values_list("cursor", flat=True).first()
        return self.raise_lost() if found is None else found
