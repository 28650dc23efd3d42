"""How a database finds rows."""

import json
from typing import Any

from django.db import connections


def plan_of(rows: Any) -> str:
    """Return the plan of a query, by fresh statistics; of MariaDB the index alone, and a sort."""
    connection, table = connections[rows.db], rows.model._meta.db_table
    analyze = {"sqlite": "ANALYZE", "mysql": f"ANALYZE TABLE {table}"}
    with connection.cursor() as cursor:
        cursor.execute(analyze.get(connection.vendor, "ANALYZE"))
    if connection.vendor != "mysql":
        return str(rows.explain())
    plan = json.loads(json.loads(rows.explain(format="JSON")))  # Django quotes what it got
    return " ".join(_find(plan, "key") + ["Sort"] * ("filesort" in json.dumps(plan)))


def _find(plan: Any, name: str) -> list[str]:
    """Return all values of a name in a plan, however deep."""
    if isinstance(plan, list):
        return [value for part in plan for value in _find(part, name)]
    if not isinstance(plan, dict):
        return []
    own = [plan[name]] if name in plan else []
    return own + _find(list(plan.values()), name)
