"""Checks of stages: runs without their tables, and crashes that nobody clears up after."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from celery import current_app
from django.core.checks import CheckMessage
from django.db import connections
from django.db.models.functions import Now

from ..exceptions import BackendNotSupported, describe_error
from ..stages.plan import find_step_layer
from ..stages.rows import step_store
from .messages import error, warning
from .sending import LONGEST_ABSENCE, RELAY_TASK
from .tasks import beat_entries, load_tasks


def check_stages() -> list[CheckMessage]:
    """E007: runs of stages have no tables. W022: nobody sweeps. Asks the database."""
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    try:
        tasks = load_tasks(app)
    except Exception:  # noqa: BLE001 - W007 says so
        return []
    steps = [task.name for task in tasks if find_step_layer(task) is not None]
    if not steps:
        return []
    try:
        alias = step_store().alias
    except BackendNotSupported:
        return []  # E008 tells
    # Beat's sweep alone sends nothing of what is left in the outbox.
    is_swept = any(task == RELAY_TASK for _, task, _ in beat_entries(app))
    try:
        return list(_check_database(alias, _count(steps), is_swept=is_swept))
    except Exception as fault:  # noqa: BLE001 - a check must not fail
        what = f"Whether runs of stages are swept in {alias!r} can't be asked"
        return [
            warning(22, f"{what} ({describe_error(fault)}).", "See that the database is there.")
        ]


def _check_database(alias: str, steps: str, *, is_swept: bool) -> Iterator[CheckMessage]:
    from ..models import OutboxMessage, OutboxRelay, StageRun, StageStep  # needs the app registry

    tables = set(connections[alias].introspection.table_names())
    needed = {model._meta.db_table for model in (StageRun, StageStep, OutboxMessage)}
    if not needed <= tables:
        yield error(
            7,
            f"{steps} of stages, and {alias!r}, where their runs are to be, has no table for them.",
            f"Run manage.py migrate --database={alias}.",
        )
        return
    if is_swept:
        return
    relay: Any = OutboxRelay.objects.using(alias).annotate(asked_at=Now()).first()
    if relay is not None and relay.asked_at - relay.seen_at < LONGEST_ABSENCE:
        return
    ever = "ever" if relay is None else f"since {relay.seen_at:%Y-%m-%d %H:%M} ({relay})"
    yield warning(
        22,
        f"{steps} of stages, but no relay was seen in {alias!r} {ever}, and beat has no "
        f"{RELAY_TASK}: a run that a crash has stopped, or whose messages the broker did not take "
        f"at once, does not go on.",
        "Run manage.py celery_outbox relay beside the workers, which sweeps too, or add "
        f'{{"task": "{RELAY_TASK}", "schedule": 10}} to beat\'s schedule; '
        "manage.py celery_stages sweep does it once.",
    )


def _count(names: list[str]) -> str:
    if len(names) == 1:
        return f"Task {names[0]} is a step"
    return f"{len(names)} tasks, such as {names[0]}, are steps"
