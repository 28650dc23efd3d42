"""
Words that are translated by their value: decisions, headings and states, for the admin.

A heading and a decision's label are made from a name and a state is stored in a column, so
``makemessages`` can't find them where they are shown. The contexts separate these short words
from the words of other apps.
"""

from __future__ import annotations

from typing import Final

from django.utils.translation import pgettext, pgettext_lazy

#: The attributes of rows whose values are states.
STATE_NAMES: Final = frozenset({"kind", "renewal", "state", "status"})

STATES: Final = (
    # of messages
    pgettext_lazy("state", "pending"),
    pgettext_lazy("state", "sent"),
    pgettext_lazy("state", "running"),
    pgettext_lazy("state", "done"),
    pgettext_lazy("state", "failed"),
    pgettext_lazy("state", "dead"),
    # of runs and steps
    pgettext_lazy("state", "waiting"),
    pgettext_lazy("state", "succeeded"),
    pgettext_lazy("state", "aborted"),
    # kinds of locks, and whether their lease is renewed
    pgettext_lazy("state", "run"),
    pgettext_lazy("state", "message"),
    pgettext_lazy("state", "marker"),
    pgettext_lazy("state", "overdue"),
    pgettext_lazy("state", "yes"),
    pgettext_lazy("state", "no"),
)

DECISIONS: Final = (
    pgettext_lazy("decision", "Abort"),
    pgettext_lazy("decision", "Discard"),
    pgettext_lazy("decision", "Forget"),
    pgettext_lazy("decision", "Release"),
    pgettext_lazy("decision", "Resume"),
    pgettext_lazy("decision", "Retry"),
)

HEADINGS: Final = (
    pgettext_lazy("heading", "age"),
    pgettext_lazy("heading", "arguments"),
    pgettext_lazy("heading", "attempts"),
    pgettext_lazy("heading", "claimed"),
    pgettext_lazy("heading", "claimed at"),
    pgettext_lazy("heading", "claims"),
    pgettext_lazy("heading", "created at"),
    pgettext_lazy("heading", "dead at"),
    pgettext_lazy("heading", "deaths"),
    pgettext_lazy("heading", "due"),
    pgettext_lazy("heading", "due at"),
    pgettext_lazy("heading", "duration"),
    pgettext_lazy("heading", "ended"),
    pgettext_lazy("heading", "ended at"),
    pgettext_lazy("heading", "error"),
    pgettext_lazy("heading", "error type"),
    pgettext_lazy("heading", "expires at"),
    pgettext_lazy("heading", "fence"),
    pgettext_lazy("heading", "finished"),
    pgettext_lazy("heading", "free"),
    pgettext_lazy("heading", "held for"),
    pgettext_lazy("heading", "held since"),
    pgettext_lazy("heading", "holder"),
    pgettext_lazy("heading", "key"),
    pgettext_lazy("heading", "kind"),
    pgettext_lazy("heading", "lease left"),
    pgettext_lazy("heading", "note"),
    pgettext_lazy("heading", "params"),
    pgettext_lazy("heading", "place"),
    pgettext_lazy("heading", "priority"),
    pgettext_lazy("heading", "process"),
    pgettext_lazy("heading", "resent"),
    pgettext_lazy("heading", "result"),
    pgettext_lazy("heading", "returned"),
    pgettext_lazy("heading", "sent at"),
    pgettext_lazy("heading", "stage"),
    pgettext_lazy("heading", "started"),
    pgettext_lazy("heading", "started at"),
    pgettext_lazy("heading", "starts"),
    pgettext_lazy("heading", "state"),
    pgettext_lazy("heading", "status"),
    pgettext_lazy("heading", "task"),
    pgettext_lazy("heading", "task id"),
    pgettext_lazy("heading", "traceback"),
    pgettext_lazy("heading", "waiting since"),
)


def translate_state(state: str) -> str:
    """Return a state in the language of the page."""
    return pgettext("state", state)


def translate_decision(name: str) -> str:
    """Return the label of a decision in the language of the page."""
    return pgettext("decision", name.capitalize())


def translate_heading(heading: str) -> str:
    """Return a heading in the language of the page."""
    return pgettext("heading", heading)
