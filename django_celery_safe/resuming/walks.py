"""How a resumable loop goes through the rows of a queryset, or the items of a list."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from django.core.exceptions import ValidationError
from django.db import router
from django.db.models import QuerySet
from django.db.models.query import ModelIterable

from ..exceptions import ConfigurationError
from .cursor import Cursor

#: The items of a chunk, the place behind them, and whether there was no further item.
Part: TypeAlias = tuple[list[Any], Any, bool]


class Rows:
    """
    The rows of a queryset, by a unique key.

    Attributes:
        of: Names the rows in a cursor, such as ``shop.price by id``.
        alias: The database in which the chunks have to be.

    Raises:
        ConfigurationError: The key is not unique, or the queryset can't be ordered by it.
    """

    def __init__(self, rows: Any, key: str) -> None:
        meta = rows.model._meta
        self._key = field = meta.pk if key == "pk" else meta.get_field(key)
        if not (getattr(field, "unique", False) and field.concrete) or field.null:
            raise ConfigurationError(
                f"key={key!r} of {meta.label} can't name a place in a queryset: the key has to be "
                f"one column that is unique and never NULL."
            )
        self._refuse(rows)
        self.alias: str | None = rows._db or router.db_for_write(rows.model, **rows._hints)
        self._rows, self._name = rows, field.attname
        self.of = f"{meta.label_lower} by {field.attname}"

    def _refuse(self, rows: Any) -> None:
        query = rows.query
        faults = {
            "a slice": query.is_sliced,
            "distinct()": query.distinct,
            "order_by()": query.order_by or query.extra_order_by or not query.standard_ordering,
            "union() or the like": query.combinator,
            "a window function": any(
                getattr(one, "contains_over_clause", False) for one in query.annotations.values()
            ),
            "values()": not issubclass(rows._iterable_class, ModelIterable),
        }
        if fault := next((name for name, is_there in faults.items() if is_there), ""):
            raise ConfigurationError(
                f"resumable() walks rows of {rows.model._meta.label} in the order of their key, "
                f"each once, and can't do that with {fault}. Leave it out, or go through a list."
            )

    def start(self) -> Cursor:
        """Return the cursor of the beginning."""
        return Cursor(self.of, None, 0, self._rows.using(self.alias).count())

    def misfit(self, cursor: Cursor) -> str:
        """Return why a cursor does not fit, as a clause; "": it fits."""
        with suppress(ValidationError):
            if cursor.at is None or self._key.to_python(cursor.at) == cursor.at:
                return ""
        return f"the key is now a {type(self._key).__name__}"

    def read(self, at: Any, alias: str, most: int) -> Part:
        """Return up to ``most`` rows behind a place."""
        rows = self._rows.using(alias).order_by(self._name)
        if at is not None:
            rows = rows.filter(**{f"{self._name}__gt": at})
        found = list(rows[:most])
        if found and getattr(found[0], self._name) == at:  # SQLite keeps 15 digits of a decimal
            raise ConfigurationError(
                f"resumable() can't walk {self.of}: the database finds {at!r} behind itself, as it "
                f"compares that key less exactly than Python. Walk another key."
            )
        # The last key before the body runs, which may give a row another one.
        last = getattr(found[-1], self._name) if found else at
        # A join may return a row several times, one behind the other.
        once = {getattr(row, self._name): row for row in found}
        return [*once.values()], last, len(found) < most


class Items:
    """The items of a list or another sequence, by their index; as :class:`Rows` otherwise."""

    of = "a list"
    alias: str | None = None

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def start(self) -> Cursor:
        return Cursor(self.of, 0, 0, len(self._items))

    def misfit(self, cursor: Cursor) -> str:
        now, before = len(self._items), cursor.total or 0
        return "" if now >= before else f"the list has {now:,} items now, of {before:,}"

    def read(self, at: Any, alias: str, most: int) -> Part:
        items = list(self._items[at : at + most])
        return items, at + len(items), at + len(items) >= len(self._items)


def find_walk(items: Any, key: str) -> Rows | Items:
    """
    Return how to walk something.

    Raises:
        ConfigurationError: It has no places, as a generator.
    """
    if isinstance(items, QuerySet):
        return Rows(items, key)
    if isinstance(items, Sequence) and not isinstance(items, str | bytes):
        return Items(items)
    raise ConfigurationError(
        f"resumable() got {type(items).__name__}, which can't be begun in the middle. Give a "
        f"queryset, a list or a range, or set cursors yourself: checkpoint() and resumed_at()."
    )
