"""
The admin's first page, "Celery safe": an overview whose figures link to their lists.

Django shows it as the app's page of any admin site; the template of that name calls
:func:`celery_safe_overview`. Django imports this module in projects without the admin, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from django import template
from django.db import Error as DatabaseError
from django.db import router
from django.db.models import TextChoices
from django.utils.text import capfirst
from django.utils.translation import gettext_lazy as _

from ..databases import Now
from ..exceptions import CelerySafeError
from ..inspection import overview as figures
from ..models.locks import Lock
from ..models.outbox import OutboxMessage
from ..models.stages import StageRun
from ..stages import Status
from ..texts import describe_error, duration, printable

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

register = template.Library()

#: A relay writes its heartbeat once a minute. After LATE s without one the relay is late; after
#: GONE s it has certainly stopped.
LATE: Final = 180.0
GONE: Final = 3600.0
#: How long a message may be due before relaying counts as slow, and as stuck, s.
SLOW: Final = 60.0
STUCK: Final = 600.0
#: Hours of the chart.
HOURS: Final = 24
HOUR: Final = timedelta(hours=1)


class Level(TextChoices):
    """How much a figure needs an operator: a colour and a word."""

    GOOD = "good", _("fine")
    LOOK = "look", _("look at it")
    BAD = "bad", _("act")
    UNKNOWN = "unknown", _("not known")


class Card(NamedTuple):
    """A figure with its name, the list that it links to, its level and an additional text."""

    label: StrOrPromise
    value: StrOrPromise
    url: str
    level: Level
    note: StrOrPromise = ""


@register.simple_tag(takes_context=True)
def celery_safe_overview(context: Any) -> dict[str, Any]:
    """
    Return what the page shows: eight queries and a list of the locks, each with a limit.

    It shows the models in Django's ``app_list``, which the user may see on this site. A template
    is rendered after the view's transaction has ended, so that locks which live in a database can
    be asked under ``ATOMIC_REQUESTS``, too.
    """
    visible = [model for app in context["app_list"] for model in app["models"]]
    urls = {model["model"]: model["admin_url"] for model in visible}
    # How many rows ended well, and how many failed, in each of the last hours, oldest first.
    charts = {level: [0] * HOURS for level in (Level.GOOD, Level.BAD)}
    cards: list[Card] = []
    for model, ask in {OutboxMessage: _outbox, Lock: _locks, StageRun: _runs}.items():
        try:
            cards += list(ask(urls[model], charts)) if model in urls else []
        except (DatabaseError, CelerySafeError) as error:
            name = capfirst(str(model._meta.verbose_name_plural))
            cards.append(Card(name, "?", urls[model], Level.UNKNOWN, describe_error(error)))
    shown = charts if {OutboxMessage, StageRun} & urls.keys() else {}
    bars = [(level, hours, figures.shown(sum(hours)), max(hours)) for level, hours in shown.items()]
    return {"cards": cards, "charts": bars}


def count_hours(rows: Any, hours: list[int]) -> int:
    """Count rows in the hours in which they ended, oldest hour first; one query with a limit."""
    ended = rows.filter(ended_at__gte=Now() - HOURS * HOUR).order_by("-ended_at")
    moments = list(ended.values_list(Now(), "ended_at")[: figures.MOST])
    for now, ended_at in moments:
        # If a clock was set back, a row may have ended in the future.
        hours[-1 - min(max(0, (now - ended_at) // HOUR), HOURS - 1)] += 1
    return len(moments)


def _outbox(url: str, charts: dict[Level, list[int]]) -> Iterator[Card]:
    messages = OutboxMessage.objects.using(router.db_for_write(OutboxMessage))
    outbox = figures.outbox_figures(messages.db)
    if relay := outbox.relay:
        level = _level(relay.ago_s, LATE, GONE)
        ago = _("{time} ago").format(time=duration(relay.ago_s))
        yield Card(_("Relay last seen"), ago, url, level, printable(str(relay)))
    else:
        level = Level.BAD if outbox.counts["pending"] else Level.LOOK
        note = _("Run manage.py celery_outbox relay, or relay_outbox by beat.")
        yield Card(_("Relay last seen"), _("never"), url, level, note)
    level = _level(outbox.lag_s, SLOW, STUCK)
    lag = _("due for %(time)s") % {"time": duration(outbox.lag_s)} if outbox.lag_s else ""
    pending = figures.shown(outbox.counts["pending"])
    yield Card(_("Pending"), pending, f"{url}?state__exact=pending", level, lag)
    yield _zero(_("Failed"), outbox.counts["failed"], f"{url}?state__exact=failed")
    yield _zero(_("Dead"), outbox.counts["dead"], f"{url}?state__exact=dead")
    count_hours(messages.done(), charts[Level.GOOD])
    count_hours(messages.failed(), charts[Level.BAD])


def _locks(url: str, charts: dict[Level, list[int]]) -> Iterator[Card]:
    held, overdue = figures.lock_figures()
    note = _("of %(number)s held") % {"number": figures.shown(sum(held.values()))}
    yield _zero(_("Locks overdue"), overdue, url, note)


def _runs(url: str, charts: dict[Level, list[int]]) -> Iterator[Card]:
    runs = StageRun.objects.using(router.db_for_write(StageRun))
    count_hours(runs.filter(status=Status.SUCCEEDED), charts[Level.GOOD])
    failures = count_hours(runs.filter(status=Status.FAILED), charts[Level.BAD])
    url = f"{url}?status__exact=failed"
    yield _zero(_("Runs failed"), failures, url, _("in the last 24 hours"))


def _level(seconds: float, look: float, bad: float) -> Level:
    return Level.GOOD if seconds <= look else Level.LOOK if seconds < bad else Level.BAD


def _zero(label: StrOrPromise, number: int, url: str, note: StrOrPromise = "") -> Card:
    """Return the card of a figure that should be 0."""
    return Card(label, figures.shown(number), url, Level.BAD if number else Level.GOOD, note)
