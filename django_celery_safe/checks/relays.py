"""Outboxes without a relay, and runs of stages that no relay sweeps. Queries databases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from django.core.checks import CheckMessage
from django.db import DEFAULT_DB_ALIAS, connections

from .. import conf
from ..databases import is_tested
from ..exceptions import BackendNotSupported
from ..foreign_errors import describe_error
from ..inspection.findings import fault
from ..sending.outbox import outbox_aliases, task_wants_outbox
from ..stages.step_table import step_table
from .project import RELAY_TASK, Project, count

#: How long a relay may be unseen without a warning, s.
GONE: Final = 3600.0
RUN_RELAY: Final = (
    "Run manage.py celery_outbox relay beside the workers, or add "
    f'{{"task": "{RELAY_TASK}", "schedule": 10}} to beat\'s schedule'
)


def find_relay_faults(project: Project) -> Iterator[CheckMessage]:
    """E006, E007: tables are missing. W016: an outbox has no relay. W022: no relay sweeps runs."""
    senders = [task for task in project.safe_tasks if task_wants_outbox(task)]
    swept = _find_runs(project)
    relayless: set[str] = set()
    if senders and is_tested(DEFAULT_DB_ALIAS):  # otherwise E008 reports it
        users = f"{count(senders)} sent through the outbox"
        faults = _find_outbox_faults(project, users, swept, relayless)
        yield from _asking("W016", "which databases have an outbox", faults)
    if swept is not None:
        users = f"{count(project.steps, 'is a step', 'are steps')} of stages"
        question = f"whether runs of stages are swept in {swept!r}"
        faults = _find_stage_faults(project, swept, users, is_relayless=swept in relayless)
        yield from _asking("W022", question, faults)


def _find_runs(project: Project) -> str | None:
    """Return the alias of the database of runs; None: no task is a step, or E008 reports it."""
    try:
        return step_table().alias if project.steps else None
    except BackendNotSupported:
        return None


def _asking(id_: str, question: str, faults: Iterator[CheckMessage]) -> Iterator[CheckMessage]:
    """Yield a database's findings, or that the query failed: a check must not raise."""
    try:
        yield from faults
    except Exception as error:  # noqa: BLE001 - whatever a database or its driver raises
        text = f"Could not find out {question} ({describe_error(error)})."
        yield fault(id_, text, "Check that the database is up and reachable.")


def _find_outbox_faults(
    project: Project, users: str, swept: str | None, relayless: set[str]
) -> Iterator[CheckMessage]:
    """Yield E006 and W016, and add the databases that W016 reports to ``relayless``."""
    outboxes = outbox_aliases()
    if not outboxes:
        yield fault("E006", f"{users}, and no database has its table.", "Run manage.py migrate.")
    if project.beat_relays():
        return
    # The database for locks also has the table, but it stays empty.
    for alias in [alias for alias in outboxes if alias != conf.get("LOCK_DATABASE")] or outboxes:
        question = f"whether a relay empties the outbox of {alias!r}"
        for finding in _asking("W016", question, _find_absent_relay(alias, users, swept)):
            relayless.add(alias)
            yield finding


def _find_absent_relay(alias: str, users: str, swept: str | None) -> Iterator[CheckMessage]:
    runs = ", and stages may stall" if alias == swept else ""
    if absent := _find_absence(alias):
        yield fault(
            "W016",
            f"{users}, but no relay has been seen in {alias!r} {absent}, and beat runs none: a "
            f"message that can't be sent at its commit waits for ever{runs}.",
            f"{RUN_RELAY}.",
        )


def _find_stage_faults(
    project: Project, alias: str, users: str, *, is_relayless: bool
) -> Iterator[CheckMessage]:
    from ..models.outbox import OutboxMessage  # needs the app registry
    from ..models.stages import StageRun, StageStep

    tables = set(connections[alias].introspection.table_names())
    if not {model._meta.db_table for model in (StageRun, StageStep, OutboxMessage)} <= tables:
        text = f"{users}, and {alias!r}, where their runs are to be, has no table for them."
        yield fault("E007", text, f"Run manage.py migrate --database={alias}.")
    # Beat's sweep alone does not send the messages that remain in the outbox.
    elif not (is_relayless or project.beat_relays()) and (absent := _find_absence(alias)):
        yield fault(
            "W022",
            f"{users}, but no relay has been seen in {alias!r} {absent}, and beat runs none: a run "
            f"that stalls after a crash is not repaired.",
            f"{RUN_RELAY}, or sweep once by manage.py celery_stages sweep.",
        )


def _find_absence(alias: str) -> str | None:
    """Return since when a database has had no relay, as a clause; None: a relay was seen."""
    from ..inspection.overview import find_relay  # needs the app registry

    relay = find_relay(alias)
    if relay is None:
        return "yet"
    return None if relay.ago_s < GONE else f"since {relay.at:%Y-%m-%d %H:%M} ({relay.name})"
