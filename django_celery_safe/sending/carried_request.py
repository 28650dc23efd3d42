"""A worker's request: the death of a task's process is no failure if a row runs it again."""

from __future__ import annotations

from typing import Any

from billiard.exceptions import WorkerLostError
from celery.app.task import Context
from celery.worker import state
from celery.worker.request import Request
from celery.worker.state import task_ready

from ..compat import as_exception, fail_rejected, retries_after_death, send_task_failure
from ..delivery.header import get_header
from ..texts import describe_error, get_logger

logger = get_logger(__name__)


class SafeRequest(Request):
    """
    A Celery request that stores no result if the process of a carried task dies.

    The task is run again. Celery's own request would store a failure, run the errbacks, and fail
    the task's chord.
    """

    #: The request as the task sees it.
    _context: Context
    _already_cancelled: bool
    _already_revoked: bool

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        """Leave a carried task whose process died to its row; otherwise do as Celery does."""
        error = exc_info.exception
        error = getattr(error, "exc", error)  # a child process wraps it
        exc_info = as_exception(exc_info, error)
        was_told = self._already_cancelled or self._already_revoked or state.should_terminate
        if isinstance(error, SystemExit | KeyboardInterrupt) and not was_told:
            error = WorkerLostError(f"Its task ended it ({describe_error(error)}).")
        if not isinstance(error, WorkerLostError) or not self._comes_by_row():
            fail_rejected(self, exc_info, error)
            return super().on_failure(exc_info, *args, **options)
        task_ready(self)
        if self.task.acks_late:
            self.acknowledge()
        send_task_failure(self, exc_info, error)
        logger.error(
            "The process of %s[%s] died; a relay sends it again: %s",
            self.name,
            self.id,
            describe_error(error),
        )
        return None

    def _comes_by_row(self) -> bool:
        """
        Return whether the task is run again because of its outbox row.

        A message that the broker delivers again, because of ``reject_on_worker_lost``, would come
        while the row still belongs to the dead process, and do nothing.
        """
        return "attempt" in get_header(self._context) and not retries_after_death(self.task)
