""":class:`SafeCeleryBackend`, which enqueues Django tasks as Celery messages."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any, Final

from celery import current_app
from django.db import DEFAULT_DB_ALIAS, transaction
from django.tasks import DEFAULT_TASK_QUEUE_NAME
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
from django.tasks.signals import task_enqueued
from django.utils import timezone

from .. import conf
from ..delivery.header import HEADER
from ..exceptions import ConfigurationError
from ..sending.outbox import UNTIL_DONE, Outbox
from ..texts import storable
from .functions import add_function, find_task
from .results import FIELD, AnyResult, AnyTask, describe, make_result, read_row, set_on

#: The keys of ``OPTIONS``, with their defaults.
OPTIONS: Final[dict[str, Any]] = {"outbox": UNTIL_DONE, "using": DEFAULT_DB_ALIAS}


class SafeCeleryBackend(BaseTaskBackend):
    """
    Runs Django tasks on the project's Celery workers.

    A task is sent when the transaction around ``enqueue`` commits, through the outbox unless
    ``OPTIONS`` says otherwise, and its result is read from the outbox.
    docs/how-to/use-django-tasks.md explains the options and the attributes of a result.
    """

    supports_defer = True
    supports_async_task = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        where = f'TASKS["{alias}"]["OPTIONS"]'
        if unknown := sorted(self.options.keys() - OPTIONS.keys()):
            raise ConfigurationError(f"{where} has {unknown}, but takes only {sorted(OPTIONS)}.")
        options = {**OPTIONS, **self.options}
        #: How messages go through the outbox, as for a ``SafeTask``.
        self.outbox: Outbox = conf.outbox(options["outbox"], f'{where}["outbox"]')
        #: The alias of the database that has the outbox and whose commit is waited for.
        self.using: str = options["using"]

    @property
    def supports_get_result(self) -> bool:  # type: ignore[override]
        """Whether a task's row stays when the task is done."""
        return self.outbox == UNTIL_DONE and conf.keeps_sent()

    def validate_task(self, task: AnyTask) -> None:
        """
        Refuse a task that can't be enqueued here; otherwise add it to the Celery apps.

        Raises:
            InvalidTask: The task can't be enqueued; the text says why.
        """
        super().validate_task(task)
        if not task.name.isidentifier() or task.func.__module__ == "__main__":
            raise InvalidTask(
                f"No worker could import the task function {task.module_path!r}. Define it with "
                f"`def`, in a module of one of the project's apps."
            )
        add_function(task, self.outbox)

    def enqueue(self, task: AnyTask, args: Any, kwargs: Any) -> AnyResult:  # type: ignore[override]
        """
        Send a task when the open transaction commits; without a transaction, send it now.

        Returns:
            The result, whose ``enqueued_at`` is None until the commit. For a duplicate (see
            ``unique_until``), its ``id`` becomes the id of the task that was sent before.

        Raises:
            InvalidTask: The backend can't run the task.
            TypeError, ValueError: The arguments don't fit the function, or are not valid JSON.
            WrongTransaction: A database other than ``using`` is inside ``atomic()``.
        """
        self.validate_task(task)
        result = make_result(task, str(uuid.uuid4()), args=args, kwargs=kwargs)
        sender: Any = current_app.tasks[task.module_path]
        sent = sender.apply_async_on_commit(
            result.args,
            result.kwargs,
            using=self.using,
            outbox=self.outbox,
            task_id=result.id,
            **_celery_options(task),
        )
        transaction.on_commit(partial(self._settle, result, sent), using=self.using)
        return result

    def get_result(self, result_id: str) -> AnyResult:
        """
        Return a task's result from its outbox row.

        Raises:
            TaskResultDoesNotExist: No row has this id: the task was never committed, or its row
                was older than ``RETENTION["sent"]``.
            NotImplementedError: The settings don't keep rows.
        """
        if not self.supports_get_result:
            raise NotImplementedError(
                f'The backend {self.alias!r} has no results. It needs "outbox": "until_done" in '
                f"its OPTIONS, which is the default, and DJANGO_CELERY_SAFE with an "
                f'RETENTION, such as {{"sent": timedelta(days=1)}}, after which results go.'
            )
        from ..models.outbox import OutboxMessage  # needs the app registry

        # PostgreSQL refuses to look for an id that it can't store.
        rows = OutboxMessage.objects.using(self.using).carried(storable(str(result_id)))
        row = rows.order_by("-pk").first()
        task = None if row is None else find_task(row.task)
        if task is None:
            raise TaskResultDoesNotExist(result_id)
        return read_row(task, row)

    def _settle(self, result: AnyResult, sent: Any) -> None:
        """Record the outcome of a send in the result, after the commit."""
        if sent.is_duplicate:
            set_on(result, id=sent.id)
        elif self.outbox or sent.send_error is None:
            set_on(result, enqueued_at=timezone.now())
            task_enqueued.send_robust(type(self), task_result=result)


def _celery_options(task: AnyTask) -> dict[str, Any]:
    """Return Celery's options for sending a task."""
    ours = {"task": task.module_path, FIELD: describe(task)}
    options: dict[str, Any] = {"headers": {HEADER: ours}}
    if task.queue_name != DEFAULT_TASK_QUEUE_NAME:
        options["queue"] = task.queue_name
    if (due := task.run_after) is not None:
        options["eta"] = timezone.make_aware(due) if timezone.is_naive(due) else due
    return options
