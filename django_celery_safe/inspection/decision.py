"""The decisions that an operator may take about a row, in commands and in the admin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..exceptions import CelerySafeError
from .words import translate_decision

if TYPE_CHECKING:
    from django.utils.functional import _StrPromise


class Refused(CelerySafeError):
    """A decision is not possible for the row's current state; the text says why."""


class NeedsForce(Refused):
    """A decision was refused, but force would allow it."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """
    An action on rows that an operator may take, after a confirmation.

    Attributes:
        name: A verb: the action of a command, and in the admin's form and permission.
        act: Applies the decision to a row; a true second argument forces it. Returns a false
            value if the row has changed since it was shown, or raises one of our errors.
        consequence: The effect, as stated in the question to the operator.
        done: The report about a row afterwards, such as ``was released``.
        changed: The reason why ``act`` returned a false value.
        why_not: Returns why a row needs force; "": it does not.
        force: The label of the checkbox that forces the decision; "": there is no checkbox.
        deletes: Whether the decision deletes the row.
        fits: Returns whether a row's own page offers the decision.
    """

    name: str
    act: Callable[[Any, bool], object]
    consequence: str | _StrPromise
    done: str | _StrPromise
    changed: str | _StrPromise = ""
    why_not: Callable[[Any], str] = lambda row: ""
    force: str | _StrPromise = ""
    deletes: bool = False
    fits: Callable[[Any], bool] = lambda row: True

    @property
    def label(self) -> str:
        """The verb in the list of actions and on the button, in the language of the page."""
        return translate_decision(self.name)

    def take(self, row: Any, *, force: bool = False) -> None:
        """
        Apply the decision to a row.

        Raises:
            NeedsForce: The row needs force; nothing was done.
            Refused: The row has changed since it was shown; nothing was done.
        """
        if not force and (reason := self.why_not(row)):
            raise NeedsForce(reason)
        if not self.act(row, force):
            raise Refused(str(self.changed))
