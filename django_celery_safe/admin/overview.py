"""
The first page, "Celery safe": an overview whose figures link to their lists.

Django shows it as the app's page of any admin site: the template of that name calls
:func:`overview`. ``chart`` draws the last day.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from django.db import Error as DatabaseError
from django.db import router
from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils import timezone
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from .. import conf
from ..exceptions import CelerySafeError
from ..foreign_errors import describe_error
from ..inspection import overview as figures
from ..inspection.row import ago, duration, moment_text
from ..models.outbox import OutboxMessage
from ..models.stages import StageRun
from ..texts import printable
from .chart import Drawing, draw, number_text

#: Limit up to which rows and locks are counted: "10,000+" tells an operator enough.
MOST: Final = 10_000
#: A relay writes its heartbeat once a minute. After LATE s without one the relay is late; after
#: GONE s it has certainly stopped.
LATE: Final = 180.0
GONE: Final = 3600.0
#: How long a message may be due before relaying counts as slow, and as stuck, s.
SLOW: Final = 60.0
STUCK: Final = 600.0

Answer = TypeVar("Answer")
Text = str | Promise


@dataclass(frozen=True)
class Card:
    """
    A figure of the page.

    Attributes:
        label: The name of the figure.
        value: The figure.
        url: The list that the card links to.
        level: ``good``, ``look``, ``bad``, or ``unknown``: the colour of the state.
        state: The state in a word; "": the card is only a number.
        note: An additional text.
    """

    label: Text
    value: str
    url: str
    level: str = ""
    state: str = ""
    note: str = ""


@dataclass(frozen=True)
class Overview:
    """The page: its cards, the chart, the sources that did not answer, and its time."""

    cards: list[Card]
    drawing: Drawing | None
    chart_note: str
    faults: list[str]
    made_at: str


#: The labels of the cards that replace a source's cards if the source does not answer.
OUTBOX: Final = gettext_lazy("Outbox")
LOCKS: Final = gettext_lazy("Locks")
RUNS: Final = gettext_lazy("Runs of stages")


class Page:
    """
    Makes the page for a user: only what they may see, even if a source does not answer.

    Args:
        site: The name of the admin site.
    """

    def __init__(self, request: HttpRequest, site: str) -> None:
        self._request, self._site = request, site
        self.faults: list[str] = []

    def make(self) -> Overview:
        """Collect all figures: eight queries and a list of the locks, each with a limit."""
        sees_messages, sees_runs = self._may("outboxmessage"), self._may("stagerun")
        messages = router.db_for_write(OutboxMessage) if sees_messages else None
        runs = router.db_for_write(StageRun) if sees_runs else None
        cards: list[Card] = []
        if messages is not None:
            cards += self._ask(OUTBOX, self._url("outboxmessage"), self._outbox, messages)
        if self._may("lock"):
            cards += self._ask(LOCKS, self._url("lock"), self._locks)
        if runs is not None:
            cards += self._ask(RUNS, self._url("stagerun"), self._runs, runs)
        drawing: Drawing | None = None
        note = ""
        if sees_messages or sees_runs:
            try:
                chart = figures.last_hours(messages, runs, MOST)
                drawing, note = draw(chart), _about_chart(chart, with_messages=sees_messages)
            except DatabaseError as error:
                self.faults.append(describe_error(error))
        made_at = moment_text(timezone.now())
        return Overview(cards, drawing, note, list(dict.fromkeys(self.faults)), made_at)

    def _ask(
        self, label: Text, url: str, question: Callable[..., Iterator[Card]], *args: Any
    ) -> list[Card]:
        try:
            return list(question(*args))
        except (DatabaseError, CelerySafeError) as error:
            self.faults.append(f"{label}: {describe_error(error)}")
            return [Card(label, "?", url, "unknown", _("not known"), _("It could not be asked."))]

    def _outbox(self, alias: str) -> Iterator[Card]:
        outbox = figures.outbox_figures(alias, MOST)
        is_needed = bool(outbox.pending.number)
        yield relay_card(outbox.relay, self._url("outboxmessage"), is_needed=is_needed)
        pending = self._url("outboxmessage", "state=pending")
        yield Card(_("Pending"), _number(outbox.pending), pending)
        oldest = "-" if outbox.oldest_s is None else duration(outbox.oldest_s)
        level, state = "good", _("in time")
        if outbox.lag_s > SLOW:
            level, state = ("look", _("slow")) if outbox.lag_s < STUCK else ("bad", _("stuck"))
        late = _("due for %(time)s") % {"time": duration(outbox.lag_s)} if level != "good" else ""
        yield Card(_("Oldest pending"), oldest, pending, level, state, late)
        yield self._decide(_("Failed"), outbox.failed, self._url("outboxmessage", "state=failed"))
        yield self._decide(_("Dead"), outbox.dead, self._url("outboxmessage", "state=dead"))

    def _decide(self, label: str, figure: figures.Figure, url: str, note: str = "") -> Card:
        """Return the card of a figure that should be 0."""
        if not figure.number:
            level, state = ("unknown", _("not known")) if figure.is_cut else ("good", _("none"))
        else:
            level, state = "bad", _("decide")
        return Card(label, _number(figure), url, level, state, note)

    def _locks(self) -> Iterator[Card]:
        locks = figures.lock_figures(MOST)
        held = figures.Figure(sum(locks.held.values()), locks.is_cut)
        note = _("of %(number)s held") % {"number": _number(held)}
        overdue = figures.Figure(locks.overdue, locks.is_cut)
        level, state = ("bad", _("look at it")) if locks.overdue else ("good", _("none"))
        yield Card(_("Locks overdue"), _number(overdue), self._url("lock"), level, state, note)

    def _runs(self, alias: str) -> Iterator[Card]:
        now = datetime.now(UTC)
        midnight = last_midnight(now)
        failed = figures.count_failed_runs(alias, now - midnight, MOST)
        url = self._url("stagerun", "status__exact=failed")
        note = _("since %(time)s") % {"time": moment_text(midnight)}
        yield self._decide(_("Runs failed today"), failed, url, note)

    def _may(self, model: str) -> bool:
        user: Any = self._request.user
        try:
            self._url(model)
        except NoReverseMatch:
            return False  # this site has no page for the model
        return bool(user.has_perm(f"django_celery_safe.view_{model}"))

    def _url(self, model: str, query: str = "") -> str:
        name = f"admin:django_celery_safe_{model}_changelist"
        return reverse(name, current_app=self._site) + (f"?{query}" if query else "")


def relay_card(relay: figures.RelaySeen | None, url: str, *, is_needed: bool) -> Card:
    """
    Return the card of an outbox's relay.

    Args:
        is_needed: Whether a message waits for the relay; a project may use only the locks.
    """
    label = _("Relay last seen")
    if relay is None:
        note = _("Run manage.py celery_outbox relay, or relay_outbox by beat.")
        return Card(label, _("never"), url, "bad" if is_needed else "look", _("none"), note)
    level, state = "good", _("here")
    if relay.ago_s > LATE:
        level, state = ("look", _("late")) if relay.ago_s < GONE else ("bad", _("gone"))
    note = f"{moment_text(relay.at)}, {printable(relay.name)}"
    return Card(label, ago(relay.ago_s) or "", url, level, state, note)


def last_midnight(moment: datetime) -> datetime:
    """Return when the local day of a moment began, in UTC: a day may have 23 or 25 hours."""
    midnight = timezone.localtime(moment).replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight.astimezone(UTC)


def _number(figure: figures.Figure) -> str:
    """Return a number formatted for people; "+": there may be more."""
    return number_text(figure.number) + ("+" if figure.is_cut else "")


def _about_chart(chart: figures.Chart, *, with_messages: bool) -> str:
    """Return the reasons why the chart does not show everything."""
    parts = []
    if chart.counted < figures.HOURS:
        text = _(
            "Only the last %(number)s of each kind are counted, which is all of the last "
            "%(hours)d hours; those before show too few."
        )
        parts.append(text % {"number": number_text(MOST), "hours": chart.counted})
    if with_messages and not conf.keeps_sent():
        text = _("Carried tasks that end well leave no row to count: RETENTION is 0.")
        parts.append(text)
    return " ".join(parts)
