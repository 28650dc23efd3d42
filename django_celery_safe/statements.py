"""
Statements on a hot path, which the ORM compiles only once instead of at every use.

Compiling takes several times as long as the database needs for a short statement. The
statements are written as querysets nevertheless, with :class:`Param` as a placeholder.

A limit of ``python -m tests.benchmarks`` needs that. Measured in November 2026 on PostgreSQL,
with the same statements compiled at each use: the first run of an ``idempotent`` task took 2.6
to 2.9 times an INSERT and an UPDATE instead of 1.2 to 1.3, and the limit is 2.5. A stage of
1,000 steps took 1.3 times a chord instead of 0.8; its limit of 1.5 would also be kept without
this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from django.core.exceptions import EmptyResultSet
from django.db import connections, transaction
from django.db.models import Expression, Field, Model, QuerySet
from django.db.models.constants import OnConflict
from django.db.models.expressions import Col
from django.db.models.sql import DeleteQuery, InsertQuery, UpdateQuery
from django.db.models.sql.where import WhereNode

from .databases import MYSQL
from .transactions import attempts

M = TypeVar("M", bound=Model)


class Param(Expression):
    """
    A placeholder for a value in a statement.

    Args:
        name: The keyword with which the statement receives the value.
        output_field: The value's field, if the ORM needs it, for example for a duration.
    """

    def __init__(self, name: str, output_field: Field[Any, Any] | None = None) -> None:
        super().__init__(output_field=output_field)
        self.name = name

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        return "%s", (self,)

    def value(self, values: Mapping[str, Any], connection: Any) -> Any:
        """Return the value in the form that the database gets."""
        given = values[self.name]
        field = getattr(self, "_output_field_or_none", None)
        return given if field is None else field.get_db_prep_value(given, connection)


class RowMapper(NamedTuple):
    """How a row of a SELECT becomes an instance with its related objects and annotations."""

    converters: Mapping[int, Any]
    model: type[Model]
    columns: Sequence[int]
    names: Sequence[str]
    #: For each related instance: the function that sets it, and its own mapper.
    related: Sequence[tuple[Callable[[Any, Any], None], RowMapper]]
    annotations: Mapping[str, int]

    @classmethod
    def of(cls, compiler: Any, info: Mapping[str, Any] | None = None) -> RowMapper:
        """Return the mapper of a compiled SELECT, which reads rows like Django's ModelIterable."""
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
        """Return the instance for a row that the database returned."""
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


#: A statement and its parameters; a Param stands for a value.
Sql: TypeAlias = tuple[str, tuple[Any, ...]]


class Compiled(NamedTuple):
    """A statement as a database gets it, and how its rows are read."""

    change: Sql
    reading: RowMapper | None
    #: The SELECT of the changed row, for a database whose UPDATE returns nothing.
    reread: Sql | None = None


def change_returning(
    rows: QuerySet[Any], sets: Mapping[str, Any] | None, *columns: str
) -> list[tuple[Any, ...]]:
    """
    Update or delete rows, and return these columns of each row, with the new values.

    Args:
        sets: The new values; None: delete the rows, without Django's signals, whose receivers
            could fail.
    """
    if connections[rows.db].vendor == MYSQL:
        return _read_and_change(rows, sets, columns)
    query: Any = rows.query.chain(DeleteQuery if sets is None else UpdateQuery)
    query.annotations = {}
    if sets is not None:
        query.add_update_values(sets)
    try:
        sql, params = query.get_compiler(rows.db).as_sql()
    except EmptyResultSet:  # from none() or an empty list of keys
        return []
    quoted = ", ".join(map(connections[rows.db].ops.quote_name, columns))
    with connections[rows.db].cursor() as cursor:
        cursor.execute(f"{sql} RETURNING {quoted}", params)
        return list(cursor.fetchall())  # SQLite has not done it before it was read


def _read_and_change(
    rows: QuerySet[Any], sets: Mapping[str, Any] | None, columns: Sequence[str]
) -> list[tuple[Any, ...]]:
    """Do ``change_returning`` for a database without RETURNING: lock, read and change rows."""
    found: list[tuple[Any, ...]] = []
    alias = rows.db
    for attempt in attempts(alias, f"A change of {rows.model._meta.verbose_name_plural}"):
        with attempt, transaction.atomic(using=alias):
            # All processes lock in the same order, so that they can't deadlock.
            locked = rows.order_by("pk").select_for_update()
            found = list(locked.values_list("pk", *(() if sets else columns)))
            own: Any = QuerySet(rows.model, using=alias).filter(pk__in=[row[0] for row in found])
            if not found:
                return []
            if sets is None:
                own._raw_delete(alias)
                return [row[1:] for row in found]
            own.update(**read_first(rows.model, sets))
            found = list(own.order_by("pk").values_list(*columns))
    return found


class Statement(Generic[M]):
    """
    A statement, compiled once for each database.

    Args:
        make: Gets an alias; returns a queryset, and for an UPDATE the values to set; or, for
            an INSERT, the new instance and None.
        returning: Gets the function that quotes names; returns the SQL of the columns that an
            UPDATE returns.
        changed: Gets an alias; returns the queryset of the row that the UPDATE has changed,
            which is read if the database's UPDATE returns nothing.
        whole: Whether the whole changed row is returned before those columns.
        deletes: Whether it deletes the queryset's rows, without Django's signals.
    """

    def __init__(
        self,
        make: Callable[[str], tuple[QuerySet[M] | M, dict[str, Any] | None]],
        returning: Callable[[Callable[[str], str]], str] | None = None,
        *,
        changed: Callable[[str], QuerySet[M]] | None = None,
        whole: bool = False,
        deletes: bool = False,
    ) -> None:
        self._make, self._returning, self._whole, self._deletes = make, returning, whole, deletes
        self._changed = changed
        self._compiled: dict[tuple[str, str], Compiled] = {}

    def update_returning(self, alias: str, **values: Any) -> Sequence[Any] | None:
        """
        Execute an UPDATE of one row; return its returned columns; None: no row matched.

        If the whole row is returned, its instance comes first.
        """
        with connections[alias].cursor() as cursor:
            compiled = self._execute(cursor, alias, values)
            if compiled.reread and cursor.rowcount:
                _run(cursor, compiled.reread, alias, values)
            elif compiled.reread:
                return None
            rows = cursor.fetchall()  # SQLite has not done it before it was read
        reading = compiled.reading
        if not rows or reading is None:
            return rows[0] if rows else None
        return (reading.read(alias, rows[0]), *rows[0][len(reading.columns) :])

    def execute(self, alias: str, **values: Any) -> bool:
        """Execute an INSERT, UPDATE or DELETE; return whether it affected a row."""
        with connections[alias].cursor() as cursor:
            self._execute(cursor, alias, values)
            return bool(cursor.rowcount)

    def find(self, alias: str, **values: Any) -> M | None:
        """Execute a SELECT; return the first row's instance, like the ORM; None: no row."""
        with connections[alias].cursor() as cursor:
            reading = self._execute(cursor, alias, values).reading
            row = cursor.fetchone()
        return None if row is None or reading is None else reading.read(alias, row)

    def _execute(self, cursor: Any, alias: str, values: Mapping[str, Any]) -> Compiled:
        key = alias, connections[alias].vendor
        if key not in self._compiled:
            self._compiled[key] = self._compile(alias)
        compiled = self._compiled[key]
        _run(cursor, compiled.change, alias, values)
        return compiled

    def _compile(self, alias: str) -> Compiled:
        queryset, sets = self._make(alias)
        if isinstance(queryset, Model):
            return _compile_insert(alias, queryset)
        query: Any = queryset.query
        if sets is not None:
            query = query.chain(UpdateQuery)
            query.add_update_values(read_first(queryset.model, sets))
        elif self._deletes:
            query = query.chain(DeleteQuery)
        compiler = query.get_compiler(alias)
        sql, params = compiler.as_sql()
        if self._returning is None:
            reading = None if self._deletes or sets is not None else RowMapper.of(compiler)
            return Compiled((sql, tuple(params)), reading)
        columns, reading = self._returning(connections[alias].ops.quote_name), None
        if self._whole:
            compiler = queryset.query.get_compiler(alias)
            compiler.as_sql()
            own = ", ".join(column for _, (column, _), _ in compiler.select)
            columns, reading = f"{own}, {columns}", RowMapper.of(compiler)
        if connections[alias].vendor != MYSQL or self._changed is None:
            return Compiled((f"{sql} RETURNING {columns}", tuple(params)), reading)
        return Compiled((sql, tuple(params)), reading, self._compile_reread(alias, columns))

    def _compile_reread(self, alias: str, columns: str) -> Sql:
        """Return the SELECT for columns of the row that the UPDATE has changed."""
        assert self._changed is not None
        sql, params = self._changed(alias).only("pk").query.get_compiler(alias).as_sql()
        # Without FOR UPDATE, REPEATABLE READ would show the state at the transaction's start.
        found = sql[sql.index(" FROM ") :]
        return f"SELECT {columns}{found} FOR UPDATE", tuple(params)


def _run(cursor: Any, statement: Sql, alias: str, values: Mapping[str, Any]) -> None:
    sql, params = statement
    connection = connections[alias]
    cursor.execute(
        sql, [one.value(values, connection) if type(one) is Param else one for one in params]
    )


def read_first(model: type[Model], sets: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the changes of an UPDATE, with those that read columns first.

    MySQL makes the changes one after the other: a later change would read an earlier one's value.
    """
    query: Any = UpdateQuery(model)
    query.add_update_values(dict(sets))
    plain = {field.name for field, _, value in query.values if not _reads(value)}
    return dict(sorted(sets.items(), key=lambda one: one[0] in plain))


def _reads(value: Any) -> bool:
    parts = value.flatten() if hasattr(value, "flatten") else ()
    return any(isinstance(part, (Col, WhereNode)) for part in parts)


def _compile_insert(alias: str, instance: Model) -> Compiled:
    query: Any = InsertQuery(type(instance), on_conflict=OnConflict.IGNORE)
    query.insert_values(instance._meta.concrete_fields, [instance])
    ((sql, params),) = query.get_compiler(alias).as_sql()
    return Compiled((sql, tuple(params)), None)
