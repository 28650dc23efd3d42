"""Rows as commands and the admin show them: their ages, and their JSON."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.db import models

from .. import conf
from ..databases import read_moment


class ListedRow(models.Model):
    """
    A row that its queryset's ``listed()`` has read, with the database server's time of then.

    Its properties are shown by commands and by the admin; none of them makes a query.
    """

    #: The columns and properties that :meth:`as_json` shows.
    json_keys: ClassVar[tuple[str, ...]]

    class Meta:
        abstract = True

    @property
    def asked(self) -> datetime:
        """When the row was read, by the database server's clock."""
        moment: datetime = vars(self)["asked_at"]
        return moment

    @property
    def database(self) -> str:
        """The alias of its database."""
        return str(self._state.db)

    def as_json(self) -> dict[str, Any]:
        """Return the row as ``--json`` shows it; docs/reference/commands.md lists the keys."""
        return {key: self._plain(getattr(self, key)) for key in self.json_keys}

    def _plain(self, value: Any) -> Any:
        if isinstance(value, datetime):
            return read_moment(self.database, value).isoformat()
        return value

    def seconds_since(self, moment: datetime | None) -> float | None:
        """Return how long ago a moment was, s; negative: it is to come; None: there is none."""
        return None if moment is None else round((self.asked - moment).total_seconds(), 3)


def seconds_between(begin: datetime | None, end: datetime | None) -> float | None:
    """Return the time from one moment to another, s; 0 if the second is not later."""
    if begin is None or end is None:
        return None
    return round(max(0.0, (end - begin).total_seconds()), 3)


def shown(text: str) -> str:
    """Return arguments or params as they may be shown; "" without ``SHOW_ARGUMENTS``."""
    return text if conf.get("SHOW_ARGUMENTS") else ""
