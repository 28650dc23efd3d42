"""Columns and indexes that behave the same on every database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models import Q

from ..databases import exact_collation

if TYPE_CHECKING:
    _CharField = models.CharField[str, str]
    _TextField = models.TextField[str, str]
else:
    _CharField, _TextField = models.CharField, models.TextField


class _Exact:
    """Gives a field the collation that compares bytes."""

    def db_parameters(self, connection: Any) -> Any:
        """Return Django's parameters with the collation of this database."""
        parameters: Any = super().db_parameters(connection)  # type: ignore[misc]
        collation = exact_collation(connection)
        return parameters if collation is None else {**parameters, "collation": collation}


class ExactCharField(_Exact, _CharField):
    """
    A short text that is compared byte by byte, whatever the collation of the database.

    MySQL would treat ``order:ABC`` and ``order:abc`` as equal, and ignore a trailing space.
    """

    def db_type(self, connection: Any) -> str:
        """Return the type by another name: on PostgreSQL, Django indexes a varchar key for LIKE."""
        return str(super().db_type(connection)).replace("varchar", "character varying")


class ExactTextField(_Exact, _TextField):
    """A long text of any characters, whatever the character set of the database."""


class PartialIndex(models.Index):
    """
    An index of some rows, or of all rows if the database has no partial indexes, like MySQL.

    Django would leave the index out there.

    Args:
        rows: The rows that the index contains.
        whole_fields: The columns of the index if it contains all rows; (): the same columns.
    """

    def __init__(
        self, *, rows: Q, fields: Sequence[str], whole_fields: Sequence[str] = (), **options: Any
    ) -> None:
        super().__init__(fields=fields, **options)
        # Not Index.condition: Django's checks would warn that MySQL ignores it.
        self.rows, self.whole_fields = rows, whole_fields

    def create_sql(
        self, model: type[models.Model], schema_editor: Any, using: str = "", **options: Any
    ) -> Any:
        """Return the statement that creates the index."""
        is_partial = schema_editor.connection.features.supports_partial_indexes
        fields = self.fields if is_partial else self.whole_fields or self.fields
        rows = self.rows if is_partial else None
        index = models.Index(fields=fields, name=self.name, condition=rows)
        return index.create_sql(model, schema_editor, using, **options)

    def deconstruct(self) -> Any:
        """Return the arguments with which a migration makes an equal index."""
        path, args, options = super().deconstruct()
        options |= {"rows": self.rows, "whole_fields": tuple(self.whole_fields)}
        return path, args, options


def partial_index(name: str, rows: Q, fields: str, whole: str = "") -> PartialIndex:
    """Return a :class:`PartialIndex` with columns whose names are separated by spaces."""
    return PartialIndex(rows=rows, fields=fields.split(), whole_fields=whole.split(), name=name)
