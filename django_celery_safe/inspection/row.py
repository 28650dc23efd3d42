"""A row: what is known of one thing, as values for JSON and as texts for people."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar, Final

from django.db.models import Model
from django.utils.text import Truncator
from django.utils.timezone import is_aware, localtime

from ..leases.holder import HeldLock
from ..texts import printable

#: Characters of an error that the admin's lists show.
LONGEST_ERROR: Final = 100


class Row:
    """
    One thing that can be seen, as it was when ``source`` was read.

    An attribute that it does not have is that of ``source``, such as a column.

    Attributes:
        source: A lock, or a model's object that was read with the server's time as ``asked_at``.
        title: Its name in lists.
        database: The alias of its database; "": it is in none.
    """

    #: The keys of its JSON object: names of attributes.
    keys: ClassVar[tuple[str, ...]]
    #: The attributes that ``show`` and the admin's page have.
    details: ClassVar[tuple[str, ...]]
    #: The headings of attributes whose name is not the heading.
    headings: ClassVar[dict[str, str]] = {"short_error": "error"}

    def __init__(self, source: Any, title: str) -> None:
        self.source, self.title = source, title
        self.database = str(source._state.db) if isinstance(source, Model) else ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def as_json(self) -> dict[str, Any]:
        """Return it as ``--json`` shows it; docs/reference/commands.md has the keys."""
        values = {key: getattr(self, key) for key in self.keys}
        return {
            key: value.isoformat() if isinstance(value, datetime) else value
            for key, value in values.items()
        }

    def parts(self) -> list[str | None]:
        """Return what lists show below the title; None or "": nothing."""
        raise NotImplementedError

    def lines(self) -> list[str]:
        """Return the lines that lists show below the title."""
        return list(filter(None, self.parts()))

    def describe(self) -> str:
        """Return it as the admin's question and log have it."""
        return "; ".join(self.lines())

    def text(self, name: str) -> str:
        """Return an attribute as people read it."""
        value = getattr(self, name)
        if isinstance(value, datetime):
            local = localtime(value) if is_aware(value) else value
            value = f"{local:%Y-%m-%d %H:%M:%S %Z}".strip()
        return "-" if value is None or value == "" else printable(str(value))

    def texts(self) -> dict[str, str]:
        """Return what ``show`` and the admin's page have, by headings."""
        return {self.heading(name): self.text(name) for name in self.details}

    @classmethod
    def heading(cls, name: str) -> str:
        """Return what people call an attribute."""
        return cls.headings.get(name, name.replace("_", " "))

    @property
    def short_error(self) -> str:
        """The first characters of its error."""
        return Truncator(self.error).chars(LONGEST_ERROR)


class LeasedRow(Row):
    """
    One thing with a lease, and a process that has it or had it last.

    Attributes:
        task, task_id: The holder's.
        host, pid: Its process.
        process: The same for people.
        remaining_s: Seconds until the lease ends; 0: the process is gone; None: it does not run.
    """

    def __init__(self, source: Any, title: str, lease: HeldLock, *, runs: bool) -> None:
        super().__init__(source, title)
        holder, left = lease.holder, lease.remaining
        self.task, self.task_id = holder.task, holder.task_id
        self.host, self.pid = holder.host or None, holder.pid or None
        self.process = f"pid {self.pid} on {self.host}" if self.host else "not known"
        self.remaining_s = round(left or 0.0, 3) if runs else None

    @property
    def lease_left(self) -> str | None:
        """The rest of the lease, for people."""
        return None if self.remaining_s is None else duration(self.remaining_s)


def seconds_between(begin: datetime | None, end: datetime | None) -> float | None:
    """Return the time from one moment to another, s; 0 if that is not later."""
    if begin is None or end is None:
        return None
    return round(max(0.0, (end - begin).total_seconds()), 3)


def duration(seconds: float | None) -> str:
    """Return a time in as few characters as say enough; None: it is not known."""
    if seconds is None:
        return "?"
    if seconds < 100:
        return f"{seconds:.1f}s"
    if seconds < 6000:
        return f"{seconds / 60:.0f}min"
    if seconds < 360_000:
        return f"{seconds / 3600:.0f}h"
    return f"{seconds / 86400:.0f}d"


def ago(seconds: float | None) -> str | None:
    """Return how long ago something was, for people; None: it was not."""
    return None if seconds is None else f"{duration(seconds)} ago"
