"""A worker's message of a task: that its process died is no failure if the task is carried."""

from __future__ import annotations

from typing import Any, Final

from billiard.exceptions import WorkerLostError
from celery import signals, states
from celery.app.task import Context
from celery.worker.request import Request
from celery.worker.state import task_ready
from django.db import DEFAULT_DB_ALIAS

from ..delivery.header import get_header
from ..delivery.worker import in_background
from ..exceptions import describe_error
from ..texts import get_logger
from .carried import message_table

logger = get_logger(__name__)

FAILURE: Final = "Whether a task whose process died had ended could not be found out."


class SafeRequest(Request):
    """
    Celery's request, which leaves the result of a carried task open when its process dies.

    The task is run again. Celery would store the failure, run its errbacks, and fail the chord
    that it is part of.
    """

    #: The request as the task sees it.
    _context: Context

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        """Leave a task whose process died to its row; anything else is Celery's."""
        error = exc_info.exception
        error = getattr(error, "exc", error)  # as a child wraps it
        if not isinstance(error, WorkerLostError) or not self._comes_by_row():
            return super().on_failure(exc_info, *args, **options)
        task_ready(self)
        if self.task.acks_late:
            self.acknowledge()
        self._fail_if_ended(error)
        signals.task_failure.send(
            sender=self.task,
            task_id=self.id,
            exception=error,
            args=self.args,
            kwargs=self.kwargs,
            traceback=exc_info.traceback,
            einfo=exc_info,
        )
        logger.error(
            "The process of %s[%s] died; a relay sends it again when its lease is over: %s",
            self.name,
            self.id,
            describe_error(error),
        )
        return None

    def _comes_by_row(self) -> bool:
        """Return whether nothing but the row brings the task back."""
        task = self.task
        by_broker = task.acks_late and task.reject_on_worker_lost
        by_celery = getattr(task, "retry_on_worker_lost", False)  # Celery 5.7
        return "attempt" in get_header(self._context) and not (by_broker or by_celery)

    def _fail_if_ended(self, error: Exception) -> None:
        """Store the failure, as Celery does, of one that died between its end and its result."""
        header = get_header(self._context)
        table = message_table(header.get("using", DEFAULT_DB_ALIAS))

        def fail() -> None:
            row = table.find(header["attempt"])
            backend: Any = self.task.backend
            if (row is None or row.ended_at) and backend.get_state(
                self.id
            ) not in states.READY_STATES:
                backend.mark_as_failure(
                    self.id, error, request=self._context, store_result=self.store_errors
                )

        in_background(fail, table.close, FAILURE)
