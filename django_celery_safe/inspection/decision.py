"""The decisions that an operator may take about a row, wherever it is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..exceptions import CelerySafeError


class Refused(CelerySafeError):
    """A decision does not fit the row as it is now; the text says why."""


class NeedsForce(Refused):
    """A decision was refused, and would not be with force."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """
    An action on rows that an operator may take, after a confirmation.

    Attributes:
        name: A verb: the action of a command, and in the admin's form and permission.
        label: The verb as the list of actions and the button show it.
        consequence: The effect, as the question to the operator states it.
        done: The report about a row afterwards, such as ``was released``.
        act: Does it to one row, also what takes force if the second argument says so.
            Returns something false if the row changed meanwhile, or raises one of our errors.
        changed: The reason why ``act`` returned something false.
        why_not: Returns why it takes force for a row; "": it does not.
        force: The label of the box that allows it all the same; "": there is none.
        deletes: Whether nothing is left of the row.
        fits: Returns whether a row's own page offers it.
    """

    name: str
    label: str
    consequence: str
    done: str
    act: Callable[[Any, bool], object]
    changed: str = ""
    why_not: Callable[[Any], str] = lambda row: ""
    force: str = ""
    deletes: bool = False
    fits: Callable[[Any], bool] = lambda row: True

    def take(self, row: Any, *, force: bool = False) -> None:
        """
        Do it to a row.

        Raises:
            NeedsForce: It takes force; nothing was done.
            Refused: The row changed meanwhile; nothing was done.
        """
        if not force and (reason := self.why_not(row)):
            raise NeedsForce(reason)
        if not self.act(row, force):
            raise Refused(self.changed)
