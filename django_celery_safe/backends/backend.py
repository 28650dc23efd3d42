""":class:`SafeCeleryBackend`, which enqueues Django tasks as Celery messages."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from celery import _state, current_app
from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.tasks import DEFAULT_TASK_QUEUE_NAME, Task, TaskResult
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import DEFAULT_TASK_PRIORITY
from django.tasks.exceptions import InvalidTask, TaskResultDoesNotExist
from django.tasks.signals import task_enqueued
from django.utils import timezone
from kombu.exceptions import ContentDisallowed

from .. import conf
from ..delivery.header import HEADER
from ..exceptions import ConfigurationError
from ..sending.commit import must_wait
from ..sending.outbox import UNTIL_DONE, Outbox, checked_outbox
from ..sending.serialization import is_storable
from . import priorities
from .functions import add_function, find_task, get_celery_task
from .late_imports import prepare_worker
from .results import FIELD, AnyResult, AnyTask, describe, make_result, read_row, set_on

P = ParamSpec("P")
R = TypeVar("R")

#: The keys of ``OPTIONS``, with their defaults.
OPTIONS: Final[dict[str, Any]] = {"outbox": UNTIL_DONE, "using": DEFAULT_DB_ALIAS}


class SafeCeleryBackend(BaseTaskBackend):
    """
    Runs Django tasks on the project's Celery workers.

    A task is sent when the transaction around ``enqueue`` commits, through the outbox unless
    ``OPTIONS`` says otherwise, and its result is read from the outbox.
    docs/reference/django-tasks.md explains the options and the attributes of a result.
    """

    supports_defer = True
    supports_async_task = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        where = f'TASKS["{alias}"]["OPTIONS"]'
        for name in self.options.keys() - OPTIONS.keys():
            known = ", ".join(map(repr, OPTIONS))
            guess = conf.did_you_mean(name, OPTIONS)
            raise ConfigurationError(f"{where} has no {name!r}. It has: {known}.{guess}")
        options = {**OPTIONS, **self.options}
        #: How messages go through the outbox, as for a ``SafeTask``.
        self.outbox: Outbox = checked_outbox(options["outbox"], f'{where}["outbox"]')
        #: The alias of the database that has the outbox and whose commit is waited for.
        self.using: str = options["using"]
        if self.using not in connections.settings:
            known = ", ".join(map(repr, connections))
            raise ConfigurationError(
                f'{where}["using"] is {self.using!r}, which DATABASES does not have. It has: '
                f"{known}."
            )
        #: The priorities of an app's queues, cached at the first use.
        self._scales: dict[tuple[Any, str], Sequence[int]] = {}

    @property
    def supports_priority(self) -> bool:  # type: ignore[override]
        """Whether, as far as known, the broker has priorities in all of the backend's queues."""
        # A task may be defined before the project's app. Reading the current app would create
        # a default app, which other threads would then keep.
        if _state.default_app is None:  # type: ignore[attr-defined]
            return True
        return all(map(self._find_scale, self.queues or {DEFAULT_TASK_QUEUE_NAME}))

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
        if task.priority != DEFAULT_TASK_PRIORITY and not self.supports_priority:
            raise InvalidTask(
                f"Backend does not support setting priority of tasks. {priorities.HOW}"
            )
        super().validate_task(task)
        if not task.name.isidentifier():
            raise InvalidTask(
                f"Task function {task.module_path!r} has no name by which a worker could import it."
            )
        if task.func.__module__ == "__main__":
            raise InvalidTask(
                f"Task function {task.module_path!r} is of the script that runs here, which no "
                f"worker imports. Move it into a module of one of the project's apps."
            )
        add_function(task, outbox=self.outbox)

    def enqueue(self, task: Task[P, R], args: Any, kwargs: Any) -> TaskResult[P, R]:
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
        sender = get_celery_task(current_app, task.module_path)
        waits = must_wait(self.using)
        sent = sender.apply_async_on_commit(
            result.args,
            result.kwargs,
            using=self.using,
            outbox=self.outbox,
            task_id=result.id,
            **self._options_of(task),
        )
        settle = partial(self._settle, result, sent)
        if waits:
            transaction.on_commit(settle, using=self.using)
        else:
            settle()
        return result

    def get_result(self, result_id: str) -> AnyResult:
        """
        Return a task's result from its outbox row.

        Raises:
            TaskResultDoesNotExist: No row has this id: the task was never committed, or its row
                was older than ``OUTBOX_RETENTION``.
            NotImplementedError: The settings don't keep rows.
        """
        if not self.supports_get_result:
            raise NotImplementedError(
                f'The backend {self.alias!r} has no results. It needs "outbox": "until_done" in '
                f"its OPTIONS, which is the default, and DJANGO_CELERY_SAFE with an "
                f"OUTBOX_RETENTION, such as timedelta(days=1), after which results are deleted."
            )
        from ..models.outbox import OutboxMessage  # needs the app registry

        if not is_storable(str(result_id)):
            raise TaskResultDoesNotExist(result_id)  # PostgreSQL refuses to look for it
        rows = OutboxMessage.objects.using(self.using).carried(str(result_id))
        row = rows.order_by("-pk").first()
        task = None if row is None else find_task(row.task)
        if task is None:
            raise TaskResultDoesNotExist(result_id)
        try:
            return read_row(task, row)
        except ContentDisallowed as error:
            raise TaskResultDoesNotExist(result_id) from error

    def prepare_worker(self, app: Any) -> None:
        """Let a worker find tasks in modules that it has not imported."""
        prepare_worker(app)

    def _options_of(self, task: AnyTask) -> dict[str, Any]:
        """Return Celery's options for sending a task."""
        about = {"task": task.module_path, FIELD: describe(task, timezone.now())}
        options: dict[str, Any] = {"headers": {HEADER: about}}
        if task.queue_name != DEFAULT_TASK_QUEUE_NAME:
            options["queue"] = task.queue_name
        if (due := task.run_after) is not None:
            options["eta"] = timezone.make_aware(due) if timezone.is_naive(due) else due
        if scale := self._find_scale(task.queue_name):
            options["priority"] = priorities.to_broker(task.priority, scale)
        return options

    def _find_scale(self, queue: str) -> Sequence[int]:
        """Return the priorities of a queue; (): it has no priorities."""
        app: Any = current_app._get_current_object()  # type: ignore[attr-defined]
        if (app, queue) not in self._scales:
            name = None if queue == DEFAULT_TASK_QUEUE_NAME else queue
            self._scales[app, queue] = priorities.find_scale(app, name)
        return self._scales[app, queue]

    def _settle(self, result: AnyResult, sent: Any) -> None:
        """Record the outcome of a send in the result, after the commit."""
        if sent.is_duplicate:
            set_on(result, id=sent.id)
            return
        if sent.send_error is not None and not self.outbox:
            return  # the message is lost, which was reported
        set_on(result, enqueued_at=timezone.now())
        task_enqueued.send_robust(type(self), task_result=result)
