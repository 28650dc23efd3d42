"""
Statements on a hot path: the ORM compiles each once, and not again at every use.

To compile takes several times as long as the database takes for a short statement. They
are written as querysets all the same, with :class:`Param` where a value is to stand.

A limit of ``python -m tests.benchmarks`` needs that. Measured in November 2026 on PostgreSQL,
with the same statements compiled at each use: the first run of an ``idempotent`` task took 2.6
to 2.9 times an INSERT and an UPDATE instead of 1.6 to 1.9, and the limit is 2.5. A stage of
1,000 steps took 1.3 times a chord instead of 0.8; its limit of 1.5 would hold without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections
from django.db.models import Expression, Field, Model, QuerySet
from django.db.models.constants import OnConflict
from django.db.models.sql import DeleteQuery, InsertQuery, UpdateQuery

M = TypeVar("M", bound=Model)


class Param(Expression):
    """
    Where a value is to stand in a statement.

    Args:
        name: Under which the statement gets it.
        output_field: What it is, where the ORM has to know, as for a duration.
    """

    def __init__(self, name: str, output_field: Field[Any, Any] | None = None) -> None:
        super().__init__(output_field=output_field)
        self.name = name

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        return "%s", (self,)

    def value(self, values: Mapping[str, Any], connection: Any) -> Any:
        """Return what the database gets for it."""
        given = values[self.name]
        field = getattr(self, "_output_field_or_none", None)
        return given if field is None else field.get_db_prep_value(given, connection)


class RowMapper(NamedTuple):
    """How a row of a SELECT becomes an instance, with what the ORM puts beside it."""

    converters: Mapping[int, Any]
    model: type[Model]
    columns: Sequence[int]
    names: Sequence[str]
    #: The same of each instance that it refers to, and what sets it.
    related: Sequence[tuple[Callable[[Any, Any], None], RowMapper]]
    annotations: Mapping[str, int]

    @classmethod
    def of(cls, compiler: Any, info: Mapping[str, Any] | None = None) -> RowMapper:
        """Return that of a compiled SELECT, as Django's ModelIterable reads it."""
        top = info is None
        info = compiler.klass_info if info is None else info
        columns = info["select_fields"]
        expressions = [one[0] for one in compiler.select]
        return cls(
            compiler.get_converters(expressions) if top else {},
            info["model"],
            columns,
            [compiler.select[index][0].target.attname for index in columns],
            [
                (one["local_setter"], cls.of(compiler, one))
                for one in info.get("related_klass_infos", ())
            ],
            compiler.annotation_col_map or {} if top else {},
        )

    def read(self, alias: str, row: Sequence[Any]) -> Any:
        """Return the instance of a row that the database gave."""
        values = list(row)
        for index, (converters, expression) in self.converters.items():
            for convert in converters:
                values[index] = convert(values[index], expression, connections[alias])
        found: Any = self._instance(alias, values)
        for name, index in self.annotations.items():
            setattr(found, name, values[index])
        return found

    def _instance(self, alias: str, values: Sequence[Any]) -> Model:
        own = self.model.from_db(alias, self.names, [values[index] for index in self.columns])
        for refer, reading in self.related:
            refer(own, reading._instance(alias, values))
        return own


def change_returning(
    rows: QuerySet[Any], sets: Mapping[str, Any] | None, *columns: str
) -> list[tuple[Any, ...]]:
    """
    Update rows, or delete them, and return these columns of each, as they are after that.

    Args:
        sets: What to set; None: delete them, without the signals that others' receivers
            could make fail.
    """
    query: Any = rows.query.chain(DeleteQuery if sets is None else UpdateQuery)
    query.annotations = {}
    if sets is not None:
        query.add_update_values(sets)
    try:
        sql, params = query.get_compiler(rows.db).as_sql()
    except EmptyResultSet:  # of none(), and where a list of keys is empty
        return []
    quoted = ", ".join(map(connections[rows.db].ops.quote_name, columns))
    with connections[rows.db].cursor() as cursor:
        cursor.execute(f"{sql} RETURNING {quoted}", params)
        return list(cursor.fetchall())  # SQLite has not done it before it was read


class Statement(Generic[M]):
    """
    A statement, compiled once for each database.

    Args:
        make: Gets an alias; returns a queryset, and for an UPDATE what it sets; or the
            instance that an INSERT adds, and None.
        returning: Gets what quotes a name; returns what an UPDATE returns of its rows, as
            SQL, and the Slots where it has %s.
        whole: Whether it returns the whole of the changed row before that.
        deletes: Whether it deletes the rows of the queryset, and sends no signals of Django.
    """

    def __init__(
        self,
        make: Callable[[str], tuple[QuerySet[M] | M, dict[str, Any] | None]],
        returning: Callable[[Callable[[str], str]], tuple[str, Sequence[Param]]] | None = None,
        *,
        whole: bool = False,
        deletes: bool = False,
    ) -> None:
        self._make, self._returning, self._whole, self._deletes = make, returning, whole, deletes
        self._compiled: dict[tuple[str, str], tuple[str, tuple[Any, ...], RowMapper | None]] = {}

    def update_returning(self, alias: str, **values: Any) -> Sequence[Any] | None:
        """
        Execute an UPDATE of one row; return what it returns of it; None: there is none.

        Of the whole row, the instance comes first.
        """
        with connections[alias].cursor() as cursor:
            reading = self._execute(cursor, alias, values)
            rows = cursor.fetchall()  # SQLite has not done it before it was read
        if not rows or reading is None:
            return rows[0] if rows else None
        return (reading.read(alias, rows[0]), *rows[0][len(reading.columns) :])

    def execute(self, alias: str, **values: Any) -> bool:
        """Execute an INSERT, UPDATE or DELETE; return whether it affected a row."""
        with connections[alias].cursor() as cursor:
            self._execute(cursor, alias, values)
            return bool(cursor.rowcount)

    def find(self, alias: str, **values: Any) -> M | None:
        """Execute a SELECT; return its first row, as the ORM would; None: there is none."""
        with connections[alias].cursor() as cursor:
            reading = self._execute(cursor, alias, values)
            row = cursor.fetchone()
        return None if row is None or reading is None else reading.read(alias, row)

    def _execute(self, cursor: Any, alias: str, values: Mapping[str, Any]) -> RowMapper | None:
        connection = connections[alias]
        key = alias, connection.vendor
        if key not in self._compiled:
            self._compiled[key] = self._compile(alias)
        sql, params, reading = self._compiled[key]
        cursor.execute(
            sql, [one.value(values, connection) if type(one) is Param else one for one in params]
        )
        return reading

    def _compile(self, alias: str) -> tuple[str, tuple[Any, ...], RowMapper | None]:
        queryset, sets = self._make(alias)
        if isinstance(queryset, Model):
            return _compile_insert(alias, queryset)
        query: Any = queryset.query
        if sets is not None:
            query = query.chain(UpdateQuery)
            query.add_update_values(sets)
        elif self._deletes:
            query = query.chain(DeleteQuery)
        compiler = query.get_compiler(alias)
        sql, params = compiler.as_sql()
        if self._returning is not None:
            more, slots = self._returning(connections[alias].ops.quote_name)
            sql, params = f"{sql} RETURNING {more}", (*params, *slots)
        if self._deletes or (sets is not None and not self._whole):
            return sql, tuple(params), None
        if self._whole:
            compiler = queryset.query.get_compiler(alias)
            compiler.as_sql()
            columns = ", ".join(column for _, (column, _), _ in compiler.select)
            sql = sql.replace(" RETURNING ", f" RETURNING {columns}, ", 1)
        return sql, tuple(params), RowMapper.of(compiler)


def _compile_insert(alias: str, instance: Model) -> tuple[str, tuple[Any, ...], None]:
    query: Any = InsertQuery(type(instance), on_conflict=OnConflict.IGNORE)
    query.insert_values(instance._meta.concrete_fields, [instance])
    ((sql, params),) = query.get_compiler(alias).as_sql()
    return sql, tuple(params), None
