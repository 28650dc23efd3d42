"""Checks of sending: brokers that block or lose, and an outbox that nobody empties."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

from celery import current_app
from django.core.checks import CheckMessage
from django.db import DEFAULT_DB_ALIAS
from django.db.models.functions import Now

from .. import conf
from ..databases import is_tested
from ..exceptions import describe_error
from ..sending import SafeTaskMixin
from ..sending.outbox import task_wants_outbox
from ..sending.relay import find_outboxes
from .messages import error, warning
from .tasks import beat_entries, load_tasks

#: Options of kombu's Redis transport that bound the wait for a silent server.
TIMEOUTS: Final = ("socket_timeout", "socket_connect_timeout")
#: The shipped task, as beat's schedule names it.
RELAY_TASK: Final = "django_celery_safe.tasks.relay_outbox"
#: For how long a relay may be gone without a warning.
LONGEST_ABSENCE: Final = timedelta(hours=1)


def check_sending() -> list[CheckMessage]:
    """W014, W015, W017: what there is to say of how the current Celery app sends."""
    app, tasks = _app_and_safe_tasks()
    if not tasks:
        return []
    return [*_check_broker(app), *_check_pickle(tasks)]


def check_relays() -> list[CheckMessage]:
    """E006: tasks use an outbox that is not there. W016: no relay empties it. Asks the database."""
    app, tasks = _app_and_safe_tasks()
    users = [task.name for task in tasks if task_wants_outbox(task)]
    if not users or not is_tested(DEFAULT_DB_ALIAS):
        return []  # of the latter E008 tells
    try:
        outboxes = find_outboxes()
    except Exception as fault:  # noqa: BLE001 - a check must not fail
        what = f"Which databases have an outbox can't be asked ({describe_error(fault)})."
        return [warning(16, what, "See that the databases are there.")]
    if not outboxes:
        return [
            error(
                6,
                f"{_count(users)} sent through the outbox, and no database has its table.",
                "Run manage.py migrate.",
            )
        ]
    if any(task == RELAY_TASK for _, task, _ in beat_entries(app)):
        return []
    # That for locks has the table too, and nothing in it.
    used = [alias for alias in outboxes if alias != conf.get("LOCK_DATABASE")] or outboxes
    return [message for alias in used for message in _check_relay(alias, users)]


def _check_broker(app: Any) -> Iterator[CheckMessage]:
    """W014: it may block for ever. W015: it does not say what it got."""
    try:
        connection = app.connection_for_write()
        kind, options = connection.transport.driver_type, connection.transport_options
    except Exception:  # noqa: BLE001 - a broker that can't be used is not for this check
        return
    missing = [name for name in TIMEOUTS if not options.get(name)]
    if kind == "redis" and missing:
        yield warning(
            14,
            f"The broker is Redis without {' and '.join(missing)}: a server that accepts and stays "
            f"silent blocks every .delay() for ever, and every commit that sends without outbox.",
            'Set CELERY_BROKER_TRANSPORT_OPTIONS = {"socket_timeout": 10, '
            '"socket_connect_timeout": 5}.',
        )
    if kind == "amqp" and not options.get("confirm_publish"):
        yield warning(
            15,
            "The broker is AMQP without confirm_publish: a message that it never got, or could not "
            "keep, counts as sent. (What goes through the outbox is confirmed.)",
            'Set CELERY_BROKER_TRANSPORT_OPTIONS = {"confirm_publish": True}.',
        )


def _check_pickle(tasks: list[Any]) -> Iterator[CheckMessage]:
    """W017: what stands in a table becomes code."""
    names = [task.name for task in tasks if task_wants_outbox(task) and task.serializer == "pickle"]
    if names:
        yield warning(
            17,
            f"{_count(names)} sent through the outbox with pickle: who can write that table can "
            f"run code in every worker.",
            'Set serializer="json" and send plain data.',
        )


def _check_relay(alias: str, users: list[str]) -> Iterator[CheckMessage]:
    from ..models import OutboxRelay  # a model-free door, see the package's __init__

    try:
        relay: Any = OutboxRelay.objects.using(alias).annotate(asked_at=Now()).first()
    except Exception as fault:  # noqa: BLE001 - a check must not fail
        what = f"Whether a relay empties the outbox of {alias!r} can't be asked"
        yield warning(16, f"{what} ({describe_error(fault)}).", "See that the database is there.")
        return
    if relay is not None and relay.asked_at - relay.seen_at < LONGEST_ABSENCE:
        return
    ever = "ever" if relay is None else f"since {relay.seen_at:%Y-%m-%d %H:%M} ({relay})"
    yield warning(
        16,
        f"{_count(users)} sent through the outbox, but no relay was seen in {alias!r} {ever}, and "
        f"beat has none: what can't be sent right after its commit stays there.",
        "Run manage.py celery_outbox relay beside the workers, or add "
        f'{{"task": "{RELAY_TASK}", "schedule": 10}} to beat\'s schedule.',
    )


def _count(names: list[str]) -> str:
    if len(names) == 1:
        return f"Task {names[0]} is"
    return f"{len(names)} tasks, such as {names[0]}, are"


def _app_and_safe_tasks() -> tuple[Any, list[Any]]:
    app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
    try:
        tasks = load_tasks(app)
    except Exception:  # noqa: BLE001 - W007 says so
        return app, []
    # Ours is there in every project.
    return app, [task for task in tasks if isinstance(task, SafeTaskMixin)]
