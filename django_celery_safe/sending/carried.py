"""
Running a carried task, whose message stays in the outbox until the task is done.

With ``outbox="until_done"`` a run claims the row of its message under a renewed lease, and ends
the row when the run ends. If the process dies on any line, the lease expires and a relay re-sends
the message. A message whose row has ended, or is claimed by another run, does nothing.

A worker's main process records the ends that a run can't, because its process was killed. A relay
handles all others, such as the death of a whole worker, when the lease has expired.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from celery import Task, states
from celery.app.task import Context
from celery.backends.base import DisabledBackend
from celery.canvas import signature
from celery.exceptions import TaskPredicate
from django.db import DEFAULT_DB_ALIAS
from django.db import Error as DatabaseError

from .. import conf
from ..databases import Now
from ..delivery.call import Function, find_request
from ..delivery.copies import WillBeRedelivered
from ..delivery.endings import Outcome, in_background, is_dead_soon
from ..delivery.header import Header, Kept, get_header
from ..events import TASK_NOT_RUN
from ..exceptions import ClaimLost, TaskPoisoned
from ..leases.holder import HOST, HeldLock, decode_holder
from ..texts import describe_error, get_logger, storable
from ..transactions import TRIES
from ..values import decode
from .carried_run import Run, claim_message, run_of
from .followed import Fault, fail_unrun, find_follower
from .message_table import ENDED, Claimed, MessageTable, message_table
from .outbox import UNTIL_DONE, is_ours, iter_leaves, leaf_wants_outbox

logger = get_logger(__name__)


def run_carried(task: Any, request: Any, function: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Run a carried task; see :func:`run_part`."""
    return run_part(task, request, partial(function, *args, **kwargs))


def run_part(task: Any, request: Any, part: Callable[[], Any], *, is_called: bool = True) -> Any:
    """
    Run a carried task, unless its message has ended or another process runs it.

    Args:
        part: Calls the task, or what its class does before that.
        is_called: Whether it calls the task.

    Raises:
        MessageGoesOn: The task must not run for this message.
        TaskPoisoned: So many processes died in the task that it is not run again.
        ClaimLost: When the work was done, another run had claimed the message.
    """
    kept: Kept = request.safe_kept
    header, run = kept.header, kept.run
    if request.is_eager or (run is not None and run.is_called):
        return part()
    if run is None:
        run = kept.run = claim_message(task, request, header)
    run.is_called = is_called
    try:
        result = _call(run, request, header, part)
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
            request.safe_ended = "attempt"
    return result


def _succeed(run: Run, request: Context, result: Any) -> None:
    """
    End the row of a run that has returned, with what follows if that is carried too.

    Raises:
        MessageGoesOn: The row does not say that the task is done, so it runs elsewhere, or again.
    """
    task, follow = run.task, None
    followers: list[Any] = [*(request.callbacks or ()), *(request.chain or ())[-1:]]
    if (followers or request.chord) and run.resent is None and run.follower is None:
        alias = run.claim.table.alias
        if request.chord or not all(_is_carried(task.app, one, alias) for one in followers):
            if request.chord and _is_carried(task.app, request.chord, alias):
                _end_with_body(run, request)
            return  # Celery sends them, and then reports the success
        follow = partial(_send_followers, task, request, result)
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


def _call(run: Run, request: Context, header: Header, function: Callable[[], Any]) -> Any:
    """Run the task, or return the result that it was finished with before its process died."""
    found = run.found
    if run.claim.lease is None:
        run.begin(header)
    if run.unrun or found.result:
        if run.is_called:
            reason = run.unrun or "its work was finished before, and its result is returned"
            TASK_NOT_RUN.emit(run_carried, task=run.task.name, task_id=request.id, reason=reason)
        return None if run.unrun else decode(found.result)
    if found.deaths:
        _refuse_after_deaths(run.task, request.id, found)
    with run.claim.current():
        run.has_begun = run.is_called
        return function()


def _refuse_after_deaths(task: Any, task_id: str | None, found: Claimed) -> None:
    """
    Refuse to run a task in which too many processes died.

    Raises:
        TaskPoisoned: So many processes died in the task that it is not run again.
    """
    given: int | conf.Unset | None = getattr(task, "max_deaths", conf.UNSET)
    most: int | None = conf.get("MAX_DEATHS") if isinstance(given, conf.Unset) else given
    if most is not None and found.deaths >= most:
        last = decode_holder(found.last_death, HeldLock("")).holder
        process = str(last._replace(task_id=None))
        raise TaskPoisoned(f"{task.name}[{task_id}]", found.deaths, process)


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


def _is_carried(app: Any, follower: Any, alias: str) -> bool:
    """Return whether all tasks of what follows are carried in a database."""
    return all(
        is_ours(app, str(leaf.task))
        and leaf_wants_outbox(app, leaf) == UNTIL_DONE
        and leaf.options.get("using", DEFAULT_DB_ALIAS) == alias
        for leaf in iter_leaves(app, signature(follower, app=app))
    )


def _send_followers(task: Any, request: Any, result: Any) -> None:
    """Send the callbacks and the next link, as Celery's tracer does, which then finds none."""
    app, info = task.app, request.delivery_info or {}
    options = {
        "parent_id": request.id,
        "root_id": request.root_id or request.id,
        "priority": info.get("priority") if app.conf.task_inherit_parent_priority else None,
    }
    for callback in request.callbacks or ():
        signature(callback, app=app).apply_async((result,), **options)
    if request.chain:
        link = signature(request.chain[-1], app=app)
        link.apply_async((result,), chain=request.chain[:-1], **options)


def _end_with_body(run: Run, request: Any) -> None:
    """Let the row of a chord's part end with the send of the chord's body, if this run sends it."""
    body: Any = signature(request.chord, app=run.task.app)
    send, sent = body.delay, list[Any]()

    def delay(*results: Any) -> Any:
        try:
            if not run.end_with(lambda: sent.append(send(*results))):
                sent.clear()  # an earlier try was rolled back
        except DatabaseError as error:
            # Celery would fail the chord.
            text = "The row of %s can't be ended: %s"
            logger.warning(text, run.task.name, describe_error(error))
            sent.clear()  # that was rolled back
        return sent[-1] if sent else send(*results)

    body.delay = delay
    request.chord = body


def wrap_class(task: Any) -> None:
    """
    Have each carried run of a task begin before the hooks of its class, and end after them.

    An error of theirs is then the outcome of the run, and the statements for its row stand outside
    a transaction or a guard that they open. A class without hooks is left as it is: Celery calls
    the ``run`` of its tasks directly.
    """
    cls = type(task)
    if cls.before_start is not Task.before_start:
        hook = task.before_start

        @wraps(hook)
        def before_start(*args: Any, **kwargs: Any) -> Any:
            return _run(task, partial(hook, *args, **kwargs), is_called=False)

        task.before_start = before_start
    call = cls.__call__
    if call is not Task.__call__ and not hasattr(call, "carries"):

        @wraps(call)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _run(self, partial(call, self, *args, **kwargs), is_called=True)

        wrapped.carries = True  # type: ignore[attr-defined]
        cls.__call__ = wrapped


def _run(task: Any, part: Callable[[], Any], *, is_called: bool) -> Any:
    request = find_request(task, part)
    if request is None or "attempt" not in get_header(request):
        return part()
    return run_part(task, request, part, is_called=is_called)


def record(outcome: Outcome) -> None:
    """Record in the row of a carried message how the message, or its run, has ended."""
    match outcome.kind:
        case "succeeded" | "failed" | "retried" | "over":
            _end_run(outcome)
        case _ if "attempt" not in outcome.header:
            return
        case "terminated" | "revoked" | "expired" | "timed out" if not outcome.comes_again:
            _in_background(_fail_message, outcome)
        case "lost":
            _in_background(_follow_death, outcome)
        case "unknown" | "undecodable" if outcome.error is not None:
            _in_background(_note, outcome)


def _end_run(outcome: Outcome) -> None:
    """End a run whose outcome only Celery knows, such as one that ``autoretry_for`` decides."""
    run = run_of(outcome.request)
    if run is None or not run.claim.is_held or run.claim.is_of_parent():
        return
    if outcome.kind == "over":
        run.claim.end()
        run.record_failure(RuntimeError("Its result can't be stored, or what follows it be sent."))
    elif outcome.kind == "succeeded":
        run.succeed()
    else:
        run.fail(outcome.error)


def _in_background(act: Callable[[MessageTable, Outcome], object], outcome: Outcome) -> None:
    table = message_table(outcome.header.get("using", DEFAULT_DB_ALIAS))
    failure = "That a carried task has ended could not be recorded; a relay sends it again."
    in_background(lambda: act(table, outcome), failure)


def _note(table: MessageTable, outcome: Outcome) -> None:
    """Record in the row why this worker can't run the message; another may run it."""
    error = outcome.error
    kind, what = type(error).__name__, f"refused the message: {describe_error(error)}"
    if outcome.kind == "unknown":
        # Celery's name for it.
        kind, what = "NotRegistered", f"does not know the task {outcome.request.task}."
    fault, follower = Fault(kind, f"A worker on {HOST} {what}"), find_follower(outcome.header)
    rows = table.at(outcome.header["attempt"]).exclude(state="running")
    noted = rows.filter(due_at__isnull=False).update(error=storable(fault.text))
    if noted and follower is not None:
        follower.note(outcome.task_id, fault)


def _follow_death(table: MessageTable, outcome: Outcome) -> None:
    """Let a relay send a task whose process was killed again before its lease is over."""
    row = table.find(outcome.header["attempt"])
    if row is not None and _is_of(outcome, row):
        if is_dead_soon(outcome.pid or 0):
            table.at(outcome.header["attempt"]).claimed(row.token).update(due_at=Now())
    elif not table.all().carried(outcome.task_id).exclude(state__in=ENDED).exists():
        # No other attempt goes on either, such as a retry.
        _store_failure(outcome)


def _store_failure(outcome: Outcome) -> None:
    """Store a failure, as Celery does, if the row has ended but no result was stored."""
    task, request, task_id = outcome.task, outcome.request, outcome.task_id
    backend: Any = task.backend
    if isinstance(backend, DisabledBackend):
        return  # the project stores no results
    if backend.get_state(task_id) not in states.READY_STATES:
        stores = not request.ignore_result or task.store_errors_even_if_ignored
        backend.mark_as_failure(task_id, outcome.error, request=request, store_result=stores)


def _fail_message(table: MessageTable, outcome: Outcome) -> None:
    """Fail a task that was killed for good, or whose message never runs."""
    attempt, fault = outcome.header["attempt"], Fault.of(outcome.error)
    # A process that is being killed may give its claim back between the look and the update.
    for _ in range(TRIES):
        row = table.find(attempt)
        if row is None or row.due_at is None:
            return
        if row.state == "running" and not _is_of(outcome, row):
            return
        # A row that has ended meanwhile has an empty token, too.
        unended = table.at(attempt).filter(due_at__isnull=False)
        if fail_unrun(outcome.header, row, unended, row.token, fault):
            return


def _is_of(outcome: Outcome, row: Any) -> bool:
    """Return whether the run whose process was killed holds the row."""
    held_by = decode_holder(row.holder, HeldLock("")).holder
    return row.state == "running" and outcome.ended(held_by)
