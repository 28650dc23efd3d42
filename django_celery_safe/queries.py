"""
The statements of the hot path, which ``queries.sql`` holds as texts.

The ORM would take longer to compile them at each use than the database takes to run them. A text
becomes the statement of one kind of database once in each process: that database's clock, its
quotes, and what reads a changed row. All other statements are the ORM's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from django.db import connections

from .databases import CLOCKS as MICROS
from .databases import MYSQL

#: The place of keys. Several stand in the text: a database accepts a limited number of parameters.
IDS: Final = "%(ids)s"
#: The server's time in UTC, the time some seconds from now, and the seconds until a time, for each
#: kind of database.
CLOCKS: Final = {
    "postgresql": (
        "statement_timestamp()",
        r"(statement_timestamp() + make_interval(secs => \1))",
        r"CAST(EXTRACT(EPOCH FROM \1 - statement_timestamp()) AS double precision)",
    ),
    "sqlite": (
        "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
        r"strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', \1 || ' seconds')",
        r"round((julianday(\1) - julianday('now')) * 86400, 3)",
    ),
    MYSQL: (
        "utc_timestamp(6)",
        r"(utc_timestamp(6) + INTERVAL \1 SECOND)",
        r"(TIMESTAMPDIFF(MICROSECOND, utc_timestamp(6), \1) / 1e6)",
    ),
}


def execute(alias: str, name: str, ids: Sequence[int] = (), /, **values: Any) -> int:
    """
    Execute a statement; return how many rows it changed.

    Args:
        ids: The keys that it has for ``:ids``.
    """
    connection = connections[alias]
    sql, _ = _find(connection.vendor, name)
    if ids:
        sql = _place(sql, ids, values)
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return int(cursor.rowcount)


def fetch(alias: str, name: str, ids: Sequence[int] = (), /, **values: Any) -> list[Any]:
    """Execute a statement, as :func:`execute` does; return the rows that it finds or changes."""
    connection = connections[alias]
    sql, reread = _find(connection.vendor, name)
    if ids:
        sql, reread = _place(sql, ids, values), reread and _place(reread, ids, values)
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        if reread:
            if not cursor.rowcount:
                return []
            cursor.execute(reread, values)
        return list(cursor.fetchall())  # SQLite has not done it before it was read


def _place(sql: str, ids: Sequence[int], values: dict[str, Any]) -> str:
    """Give a statement its keys: one as a parameter, for which a client knows the text already."""
    if len(ids) == 1:
        values["ids"] = ids[0]
    return sql.replace(IDS, ", ".join(map(str, ids))) if len(ids) > 1 else sql


def insert(
    alias: str, name: str, rows: Sequence[dict[str, Any]]
) -> tuple[list[tuple[Any, ...]], int]:
    """
    Insert rows in one statement.

    Returns:
        The returned columns of the rows, in any order; and the key of the first row where INSERT
        returns nothing, as on MySQL.
    """
    connection, values = connections[alias], rows[0]
    returns = connection.features.can_return_rows_from_bulk_insert
    sql = _for_rows(connection.vendor, name, len(rows), returns=returns)
    if len(rows) > 1:
        values = {f"{key}_{n}": value for n, row in enumerate(rows) for key, value in row.items()}
    with connection.cursor() as cursor:
        cursor.execute(sql, values)
        return (cursor.fetchall(), 0) if returns else ([], cursor.lastrowid)


@cache
def _for_rows(vendor: str, name: str, count: int, *, returns: bool) -> str:
    """Return an INSERT of so many rows, whose parameters have the numbers of their rows."""
    sql, _ = _find(vendor, name)
    if not returns:
        sql = sql.partition("\nRETURNING ")[0]
    if count == 1:
        return sql
    head, places, tail = re.split(r"(?<=VALUES )(\(.*?\n\))", sql, maxsplit=1, flags=re.DOTALL)
    numbered = (re.sub(r"%\((\w+)\)s", rf"%(\1_{n})s", places) for n in range(count))
    return f"{head}{', '.join(numbered)}{tail}"


@cache
def _find(vendor: str, name: str) -> tuple[str, str]:
    """
    Return a statement for a kind of database, with a placeholder of its name for each parameter.

    Beside it is the SELECT of the changed rows, where UPDATE returns none; "": none is needed.
    """
    texts = _read()
    text, _, changed = texts.get(f"{name}_of_{vendor}", texts[name]).partition("\n-- changed: ")
    reread = ""
    if vendor != MYSQL:
        text = text.replace("_binary ", "")
    else:
        if changed:
            text, _, columns = text.partition("\nRETURNING ")
            table = text.split()[1]
            # Without FOR UPDATE, REPEATABLE READ would show the state at the transaction's start.
            reread = f"SELECT {columns} FROM {table} WHERE {changed} FOR UPDATE"  # noqa: S608
        if text.endswith("\nON CONFLICT DO NOTHING"):
            text = text.removesuffix("\nON CONFLICT DO NOTHING").replace("INSERT", "INSERT IGNORE")
    return _adapt(text, vendor), _adapt(reread, vendor)


def _adapt(text: str, vendor: str) -> str:
    now, after, until = CLOCKS[vendor]
    text = re.sub(r"\bUNTIL\((\w+)\)", until, re.sub(r"\bAFTER\((:\w+)\)", after, text))
    text = re.sub(r"\bNOW\b", now, re.sub(r":(\w+)", r"%(\1)s", text))
    text = re.sub(r"\bMICROS\b", MICROS[vendor], text)
    if vendor == "sqlite":
        text = text.replace("GREATEST(", "MAX(")
    return text.replace('"', "`") if vendor == MYSQL else text


@cache
def _read() -> dict[str, str]:
    """Return the texts by their names."""
    text = Path(__file__).with_name("queries.sql").read_text(encoding="utf-8")
    _, *parts = re.split(r"^-- (\w+) --\n", text, flags=re.MULTILINE)
    return {name: sql.strip() for name, sql in zip(parts[::2], parts[1::2], strict=True)}
