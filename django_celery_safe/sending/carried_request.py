"""A worker's request: the death of a task's process is no failure if a row runs it again."""

from __future__ import annotations

from typing import Any

from billiard.exceptions import WorkerLostError
from celery.worker import state
from celery.worker.request import Request

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

    def on_failure(self: Any, exc_info: Any, *args: Any, **options: Any) -> Any:
        """Leave a carried task whose process died to its row; otherwise do as Celery does."""
        error = exc_info.exception
        error = getattr(error, "exc", error)  # a child process wraps it
        exc_info = as_exception(exc_info, error)
        was_told = self._already_cancelled or self._already_revoked or state.should_terminate
        if isinstance(error, SystemExit | KeyboardInterrupt) and not was_told:
            error = WorkerLostError(f"Its task ended it ({describe_error(error)}).")
        by_row = "attempt" in get_header(self._context) and not retries_after_death(self.task)
        if not (by_row and isinstance(error, WorkerLostError)):
            fail_rejected(self, exc_info, error)
            return super().on_failure(exc_info, *args, **options)
        state.task_ready(self)
        # Delivered again, because of ``reject_on_worker_lost``, the message would come while the
        # row still belongs to the dead process, and do nothing.
        if self.task.acks_late:
            self.acknowledge()
        send_task_failure(self, exc_info, error)
        text = "The process of %s[%s] died; a relay sends it again: %s"
        logger.error(text, self.name, self.id, describe_error(error))
        return None
