"""
Running a carried task, whose message stays in the outbox until the task is done.

With ``outbox="until_done"`` a run claims the row of its message under a renewed lease, and ends
the row when the run ends. If the process dies on any line, the lease expires and a relay re-sends
the message. A message whose row has ended, or is claimed by another run, does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from celery._state import get_current_task
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, SoftTimeLimitExceeded, TaskPredicate
from django.db import Error as DatabaseError

from ..delivery.call import Args, Function, Kwargs
from ..delivery.copies import MessageGoesOn, WillBeRedelivered
from ..delivery.deaths import refuse_after_deaths
from ..delivery.endings import Outcome
from ..delivery.header import Header, Kept, get_header
from ..events import MESSAGE_DONE, TASK_NOT_RUN
from ..exceptions import ClaimLost, TaskPoisoned
from ..foreign_errors import describe_error
from ..values import decode
from .capture import Captured, capture
from .carried_claim import claim_message
from .carried_ends import RESENT, NoAnswer, RunEnds
from .followed import find_follower
from .followers import carried_followers, end_with_body, send_followers

T = TypeVar("T")


class Run(RunEnds):
    """The run of a carried task in this process."""

    def begin(self, header: Header) -> None:
        """
        Begin to renew the lease, and begin what follows the message with this header.

        Raises:
            NoAnswer: What follows could not be read, so nothing has begun.
        """
        self.claim.begin()
        follower = self.follower = self.claim.follower = find_follower(header)
        if follower is None:
            return
        try:
            self.unrun = follower.begin(self._task_id)
        except DatabaseError as error:
            raise NoAnswer(f"No answer: {describe_error(error)}") from error
        if self.found.result:
            follower.finish(self.found.result)

    def keep(self, send: Callable[[], T], *, unchanged: bool = False) -> T:
        """
        Call ``send``, and keep the messages that it sends until the run has ended.

        Args:
            unchanged: Whether the run's own message is sent again, because it did not begin.
        """
        self.has_begun = self.has_begun and not unchanged
        before = self.resent or Captured()  # such as a retry without throw
        captured = Captured([*before.messages], [*before.chord_calls])
        try:
            result = capture(self.task.app, captured, lambda _: send())
        except Ignore:
            self._is_replaced, self.resent = True, captured
            raise
        self.resent = captured
        return result

    def succeed(self, follow: Callable[[], object] | None = None) -> None:
        """
        Record that the task is done, or that it continues with another message.

        Args:
            follow: Sends what follows, in the transaction that ends the row.

        Raises:
            ClaimLost: Another run has claimed the message by now.
        """
        goes_on = self.resent
        try:
            if not self.has_begun:
                self._uncount_unbegun()
            ours = self._end_well(follow) if goes_on is None else self._go_on(goes_on, RESENT)
        except SoftTimeLimitExceeded:
            if not self._is_ended():
                raise
            ours = True  # it came after the statement that ended the row
        finally:
            self.claim.end()
        if not ours:
            self.claim.raise_lost()
        if goes_on is None and self.follower is None:
            self._emit_done()

    def _end_well(self, follow: Callable[[], object] | None) -> bool:
        fault = None if self.follower is None else self.follower.fault
        if fault is None or self.claim.is_finished:
            return self.end(follow) or bool(self.unrun)
        return self._record_fault(fault)

    def end_with(self, follow: Callable[[], object]) -> bool:
        """End the row together with what follows; return whether the claim still held it."""
        ours = self.end(follow)
        if ours:
            self.claim.end()
            self._emit_done()
        return ours

    def _emit_done(self) -> None:
        MESSAGE_DONE.emit(RunEnds, task=self.task.name, task_id=self._task_id)


def find_run(task_id: str | None) -> Run | None:
    """Return the run of the carried task with this id, if this code is inside that run."""
    task = get_current_task()
    run = None if task is None else _run_of(task.request)
    return run if run is not None and run.claim.is_held and task.request.id == task_id else None


def _run_of(request: Any) -> Run | None:
    """Return the run of a carried task that has begun with this request; None: none has."""
    kept = getattr(request, "safe_kept", None)
    return kept.run if isinstance(kept, Kept) else None


def is_by_row(request: Context) -> bool:
    """Return whether only the row of a carried task runs it again: no run holds the row now."""
    run = _run_of(request)
    return "attempt" in get_header(request) if run is None else not run.claim.is_held


def run_carried(
    task: Any,
    request: Context,
    function: Function,
    args: Args,
    kwargs: Kwargs,
    *,
    is_hook: bool = False,
) -> Any:
    """
    Run a carried task, unless its message has ended or another process runs it.

    Args:
        is_hook: Whether ``function`` is what the task's class does before the task is called.

    Raises:
        MessageGoesOn: The task must not run for this message.
        TaskPoisoned: So many processes died in the task that it is not run again.
        ClaimLost: When the work was done, another run had claimed the message.
    """
    kept: Kept = request.safe_kept  # type: ignore[attr-defined]
    header, run = kept.header, kept.run
    if request.is_eager or (run is not None and run.is_called):
        return function(*args, **kwargs)
    if run is None:
        begun = claim_message(task, request, header)
        if isinstance(begun, str):
            _emit_not_run(task, request, begun)
            raise MessageGoesOn(f"Not run: {begun}")
        run = kept.run = Run(begun[0], task, request, begun[1])
    run.is_called = not is_hook
    try:
        result = _call(run, request, header, partial(function, *args, **kwargs))
        # After a bare os.fork() the child also gets here, and must not end the claim.
        is_ours = not run.claim.is_of_parent()
        if is_ours and run.claim.is_finished:
            run.claim.check_committed()
    except BaseException as error:
        if not _is_for_autoretry(task, error):
            _fail(run, error)
        raise
    if run.is_called and is_ours:
        _succeed(run, request, result)
        if not run.claim.is_held:
            request.safe_ended = "attempt"  # type: ignore[attr-defined]
    return result


def _succeed(run: Run, request: Context, result: Any) -> None:
    """
    End the row of a run that has returned, with what follows if that is carried too.

    Raises:
        MessageGoesOn: The row does not say that the task is done, so it runs elsewhere, or again.
    """
    task, alias = run.task, run.claim.table.alias
    follow = None
    if run.has_followers and run.resent is None and run.follower is None:
        if not carried_followers(task, request, alias):
            # Celery sends them, and then reports the success.
            end_with_body(task, request, alias, run.end_with)
            return
        follow = partial(send_followers, task, request, result)
    try:
        _check_storable(task, request, result)
        run.succeed(follow)
    except (DatabaseError, ClaimLost) as error:
        raise WillBeRedelivered(f"Its end is not recorded: {describe_error(error)}") from error
    except Exception as error:
        _fail(run, error)
        raise
    if follow is not None:
        request.callbacks = request.chain = None


def _fail(run: Run, error: BaseException) -> None:
    """
    Record a failure.

    Raises:
        MessageGoesOn: The row does not say so: no result is stored, and no errback is called.
    """
    is_failure = isinstance(error, Exception) and not isinstance(error, TaskPredicate)
    if not run.fail(error) and is_failure:
        text = f"Its end is not recorded ({describe_error(error)})"
        raise WillBeRedelivered(text) from error


def _emit_not_run(task: Any, request: Context, reason: str) -> None:
    """Report that a task is not run for its message, and why."""
    TASK_NOT_RUN.emit(run_carried, task=task.name, task_id=request.id, reason=reason)


def _call(run: Run, request: Context, header: Header, function: Callable[[], Any]) -> Any:
    """Run the task, or return the result that it was finished with before its process died."""
    found = run.found
    if run.claim.lease is None:
        run.begin(header)
    if run.unrun:
        if run.is_called:
            _emit_not_run(run.task, request, run.unrun)
        return None
    if found.result:
        if run.is_called:
            done = "its work was finished before, and its result is returned"
            _emit_not_run(run.task, request, done)
        return decode(found.result)
    if found.deaths:
        refuse_after_deaths(run.task, request.id, found.deaths, found.last_death)
    with run.claim.current():
        run.has_begun = run.is_called
        return function()


def end_run(outcome: Outcome) -> None:
    """End a run whose outcome only Celery knows, such as one that ``autoretry_for`` decides."""
    is_over = outcome.kind == "over"
    run = _run_of(outcome.request)
    if run is None or not run.claim.is_held or run.claim.is_of_parent():
        return
    if is_over:
        run.claim.end()
        run.record_failure(RuntimeError("Its result can't be stored, or what follows it be sent."))
    elif outcome.kind == "succeeded":
        run.succeed()
    else:
        run.fail(outcome.error)


def _check_storable(task: Any, request: Context, result: Any) -> None:
    """
    Check that the result backend can take a result, as long as the row can fail because it can't.

    Raises:
        EncodeError: It can't: Celery would say so after the end of the row.
    """
    ignores = vars(request).get("ignore_result")
    if result is None or (task.ignore_result if ignores is None else ignores):
        return
    backend = task.backend
    if not isinstance(backend, DisabledBackend):
        backend.encode(backend.prepare_value(result))


def _is_for_autoretry(task: Any, error: BaseException) -> bool:
    """Return whether Celery's ``autoretry_for``, which wraps the run, may retry this error."""
    is_error = isinstance(error, Exception) and not isinstance(error, (TaskPredicate, TaskPoisoned))
    return is_error and hasattr(task, "_orig_run")
