"""Rows, which describe an object for operators: values for JSON, and texts for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Final

from django.db.models import Model
from django.utils.text import Truncator
from django.utils.timezone import is_aware, localtime
from django.utils.translation import gettext as _

from ..databases import read_moment
from ..leases.holder import HeldLock
from ..texts import printable
from .words import STATE_NAMES, translate_heading, translate_state

#: Characters of an error that the admin's lists show.
LONGEST_ERROR: Final = 100


class Row:
    """
    The description of an object as it was when ``source`` was read.

    Attributes that the row lacks, such as columns, are looked up in ``source``.

    Attributes:
        source: A lock, or a model's object that was read with the server's time as ``asked_at``.
        title: The object's name in lists.
        database: The alias of the object's database; "": it is not in a database.
    """

    #: The keys of the JSON object: names of attributes.
    keys: ClassVar[tuple[str, ...]]
    #: The attributes that ``show`` and the admin's page display.
    details: ClassVar[tuple[str, ...]]
    #: The headings of attributes whose heading differs from their name.
    headings: ClassVar[dict[str, str]] = {"short_error": "error"}

    def __init__(self, source: Any, title: str) -> None:
        self.source, self.title = source, title
        self.database = str(source._state.db) if isinstance(source, Model) else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def as_json(self) -> dict[str, Any]:
        """Return the row as ``--json`` shows it; docs/reference/commands.md lists the keys."""
        values = {key: getattr(self, key) for key in self.keys}
        return {
            key: self._moment(value).isoformat() if isinstance(value, datetime) else value
            for key, value in values.items()
        }

    def parts(self) -> list[str | None]:
        """Return the lines that lists show below the title; None or "" is left out."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """Return the lines that lists show below the title."""
        return list(filter(None, self.parts()))

    def describe(self) -> str:
        """Return the row as the admin's question and log show it."""
        return "; ".join(self.lines())

    def text(self, name: str) -> str:
        """Return an attribute as people read it."""
        value = getattr(self, name)
        if isinstance(value, datetime):
            value = moment_text(self._moment(value))
        if value is None or value == "":
            return "-"
        return printable(translate_state(str(value)) if name in STATE_NAMES else str(value))

    def _moment(self, value: datetime) -> datetime:
        return read_moment(self.database, value) if self.database else value

    def texts(self) -> dict[str, str]:
        """Return the texts that ``show`` and the admin's page display, by heading."""
        return {self.heading(name): self.text(name) for name in self.details}

    @classmethod
    def heading(cls, name: str) -> str:
        """Return the heading of an attribute."""
        return translate_heading(cls.headings.get(name, name.replace("_", " ")))

    @property
    def short_error(self) -> str:
        """The first characters of its error."""
        return Truncator(self.error).chars(LONGEST_ERROR)


class LeasedRow(Row):
    """
    An object with a lease, and the process that holds it or held it last.

    Attributes:
        task, task_id: The holder's task and its id.
        host, pid: The holder's process.
        process: The holder's process as a text for people.
        remaining_s: Seconds until the lease ends; 0: the process has died; None: not running.
    """

    def __init__(self, source: Any, title: str, lease: HeldLock, *, runs: bool) -> None:
        super().__init__(source, title)
        holder, left = lease.holder, lease.remaining
        self.task, self.task_id = holder.task, holder.task_id
        self.host, self.pid = holder.host or None, holder.pid or None
        self.process = _("not known")
        if self.host:
            self.process = _("pid {pid} on {host}").format(pid=self.pid, host=self.host)
        self.remaining_s = round(left or 0.0, 3) if runs else None

    @property
    def lease_left(self) -> str | None:
        """The rest of the lease, for people."""
        return None if self.remaining_s is None else duration(self.remaining_s)


def moment_text(moment: datetime) -> str:
    """Return a moment in the page's time zone, with its seconds."""
    local = localtime(moment) if is_aware(moment) else moment
    return f"{local:%Y-%m-%d %H:%M:%S %Z}".strip()


def seconds_between(begin: datetime | None, end: datetime | None) -> float | None:
    """Return the time from one moment to another, s; 0 if the second is not later."""
    if begin is None or end is None:
        return None
    return round(max(0.0, (end - begin).total_seconds()), 3)


def duration(seconds: float | None) -> str:
    """Return a duration as a short text; None: it is not known."""
    if seconds is None:
        return "?"
    if seconds < 100:
        return _("{seconds}s").format(seconds=f"{seconds:.1f}")
    if seconds < 6000:
        return _("{minutes}min").format(minutes=f"{seconds / 60:.0f}")
    if seconds < 360_000:
        return _("{hours}h").format(hours=f"{seconds / 3600:.0f}")
    return _("{days}d").format(days=f"{seconds / 86400:.0f}")


def ago(seconds: float | None) -> str | None:
    """Return how long ago something happened, for people; None: it did not happen."""
    return None if seconds is None else _("{time} ago").format(time=duration(seconds))
