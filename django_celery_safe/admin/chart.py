"""
The chart of the last day, as shapes for an SVG that the template writes.

Successes are above the line and failures below it, hatched, so the chart can be read without
colours. It has no script and no style, so a strict content security policy allows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from ..inspection.overview import HOURS, Chart, Hour

#: Units of the picture: its width and height, and the margins of the bars.
WIDTH: Final = 480
HEIGHT: Final = 178
LEFT: Final = 44
TOP: Final = 14
BARS: Final = 130
#: The width of an hour, and the width of its bar.
STEP: Final = (WIDTH - LEFT) / HOURS
BAR: Final = 13.0
#: The minimum height of a bar whose number is not 0.
LEAST: Final = 6.0


@dataclass(frozen=True)
class Bar:
    """A rectangle."""

    x: float
    y: float
    height: float


@dataclass(frozen=True)
class HourDrawn:
    """
    An hour of the chart.

    Attributes:
        label: The time of the hour, in words.
        done, failed: The numbers, formatted for people.
        above, below: The bars of these numbers; None: the number is 0.
        x: The left edge of the hour.
        is_counted: Whether the hour is counted completely.
    """

    label: str
    done: str
    failed: str
    above: Bar | None
    below: Bar | None
    x: float
    is_counted: bool


@dataclass(frozen=True)
class Drawing:
    """
    The chart.

    Attributes:
        summary: A sentence that says the same as the chart.
        line: The y position of the line between successes and failures.
        most_done, most_failed: The largest numbers; "": all are 0.
        is_empty: Whether no task or run ended.
    """

    hours: list[HourDrawn]
    summary: str
    line: float
    most_done: str
    most_failed: str
    is_empty: bool
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    top: int = TOP
    bottom: int = TOP + BARS
    step: float = STEP
    bar: float = BAR


def draw(chart: Chart) -> Drawing:
    """Return the shapes of a chart: one scale for both kinds, and a visible bar if not 0."""
    most_done = max(hour.done for hour in chart.hours)
    most_failed = max(hour.failed for hour in chart.hours)
    scale = BARS / ((most_done + most_failed) or 1)
    line = TOP + (most_done * scale if most_done + most_failed else BARS)
    drawn = [
        _draw_hour(hour, number, line, scale, is_counted=HOURS - number <= chart.counted)
        for number, hour in enumerate(chart.hours)
    ]
    done, failed = (sum(numbers) for numbers in zip(*chart.hours, strict=True))
    numbers = {"done": number_text(done), "failed": number_text(failed)}
    summary = _("In the last 24 hours %(done)s ended well and %(failed)s failed.") % numbers
    return Drawing(
        hours=drawn,
        summary=summary,
        line=round(line, 1),
        most_done=number_text(most_done) if most_done else "",
        most_failed=number_text(most_failed) if most_failed else "",
        is_empty=not done and not failed,
    )


def _draw_hour(
    hour: Hour, number: int, line: float, scale: float, *, is_counted: bool
) -> HourDrawn:
    x = round(LEFT + number * STEP, 1)
    left = round(x + (STEP - BAR) / 2, 1)
    ago = HOURS - number
    above, below = (max(LEAST, each * scale) for each in hour)
    return HourDrawn(
        label=_("%(from)d to %(to)d h ago") % {"from": ago, "to": ago - 1},
        done=number_text(hour.done),
        failed=number_text(hour.failed),
        above=Bar(left, round(line - above, 1), round(above, 1)) if hour.done else None,
        below=Bar(left, round(line, 1), round(below, 1)) if hour.failed else None,
        x=x,
        is_counted=is_counted,
    )


def number_text(number: int) -> str:
    """Return a number formatted for the page's language."""
    return number_format(number, force_grouping=True)
