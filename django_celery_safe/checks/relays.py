"""Outboxes that no relay empties, and runs of stages that no relay sweeps. Asks databases."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from django.db import DEFAULT_DB_ALIAS, connections
from django.db.models.functions import Now

from .. import conf
from ..databases import is_tested
from ..exceptions import BackendNotSupported, describe_error
from ..inspection.findings import Finding, fault
from ..sending.outbox import outbox_aliases, task_wants_outbox
from ..stages.step_table import step_table
from .project import RELAY_TASK, Project, count

#: For how long a relay may be gone without a warning.
LONGEST_ABSENCE: Final = timedelta(hours=1)
RUN_RELAY: Final = (
    "Run manage.py celery_outbox relay beside the workers, or add "
    f'{{"task": "{RELAY_TASK}", "schedule": 10}} to beat\'s schedule'
)


def find_relay_faults(project: Project) -> Iterator[Finding]:
    """E006, E007: tables are missing. W016: no relay empties an outbox. W022: nor sweeps runs."""
    senders = [task for task in project.safe_tasks if task_wants_outbox(task)]
    if senders and is_tested(DEFAULT_DB_ALIAS):  # otherwise E008 says so
        faults = _find_outbox_faults(project, f"{count(senders)} sent through the outbox")
        yield from _asking("W016", "Which databases have an outbox", faults)
    if project.steps:
        try:
            alias = step_table().alias
        except BackendNotSupported:
            return  # E008 says so
        users = f"{count(project.steps, 'is a step', 'are steps')} of stages"
        question = f"Whether runs of stages are swept in {alias!r}"
        yield from _asking("W022", question, _find_stage_faults(project, alias, users))


def _asking(id_: str, question: str, faults: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the answer of a database, or that it can't be asked: a check must not fail."""
    try:
        yield from faults
    except Exception as error:  # noqa: BLE001 - whatever a database or its driver raises
        text = f"{question} can't be asked ({describe_error(error)})."
        yield fault(id_, text, "See that the database is there.")


def _find_outbox_faults(project: Project, users: str) -> Iterator[Finding]:
    outboxes = outbox_aliases()
    if not outboxes:
        yield fault("E006", f"{users}, and no database has its table.", "Run manage.py migrate.")
    if project.beat_relays():
        return
    # The database for locks has the table too, and nothing in it.
    for alias in [alias for alias in outboxes if alias != conf.get("LOCK_DATABASE")] or outboxes:
        question = f"Whether a relay empties the outbox of {alias!r}"
        yield from _asking("W016", question, _find_absent_relay(alias, users))


def _find_absent_relay(alias: str, users: str) -> Iterator[Finding]:
    if absent := _find_absence(alias):
        yield fault(
            "W016",
            f"{users}, but no relay was seen in {alias!r} {absent}, and beat has none: messages "
            f"that can't be sent right after their commit stay there.",
            f"{RUN_RELAY}.",
        )


def _find_stage_faults(project: Project, alias: str, users: str) -> Iterator[Finding]:
    from ..models.outbox import OutboxMessage  # needs the app registry
    from ..models.stages import StageRun, StageStep

    tables = set(connections[alias].introspection.table_names())
    if not {model._meta.db_table for model in (StageRun, StageStep, OutboxMessage)} <= tables:
        text = f"{users}, and {alias!r}, where their runs are to be, has no table for them."
        yield fault("E007", text, f"Run manage.py migrate --database={alias}.")
    # Beat's sweep alone sends no message that is left in the outbox.
    elif not project.beat_relays() and (absent := _find_absence(alias)):
        yield fault(
            "W022",
            f"{users}, but no relay was seen in {alias!r} {absent}, and beat has no {RELAY_TASK}: "
            f"a run that a crash has stopped, or whose messages the broker did not take at once, "
            f"does not go on.",
            f"{RUN_RELAY}, or sweep once by manage.py celery_stages sweep.",
        )


def _find_absence(alias: str) -> str | None:
    """Return since when no relay was seen in a database, as a clause; None: one is there."""
    from ..models.outbox import OutboxRelay  # needs the app registry

    relay: Any = OutboxRelay.objects.using(alias).annotate(asked_at=Now()).first()
    if relay is None:
        return "ever"
    if relay.asked_at - relay.seen_at < LONGEST_ABSENCE:
        return None
    return f"since {relay.seen_at:%Y-%m-%d %H:%M} ({relay})"
