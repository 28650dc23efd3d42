"""
:func:`idempotent`: doing work once that has no row of its own, or is slow; and its records.

The work is ours as soon as the record has the claim's token, with a lease that is renewed; no row
is locked while the work runs. One UPDATE, which checks the token, marks the record as done, so a
lost claim can't finish. Every decision is one guarded statement in its own transaction, and every
time is read from the database server's clock.
"""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar, overload

from celery._state import get_current_task
from celery.app.task import Context
from celery.exceptions import Retry, TaskPredicate
from django.db import Error as DatabaseError
from django.db import router

from .. import conf, queries
from ..compat import is_django_task
from ..concurrency.guard import refuse_lock_below
from ..concurrency.keys import key_and_digest
from ..concurrency.options import DEFAULTS, Guarded, Key, check_key_names, checked_key
from ..databases import refuse_untested
from ..delivery import copies
from ..delivery.call import (
    Args,
    Function,
    Kwargs,
    find_call,
    name_of,
    own_signature,
    run_for,
    sent_arguments,
    show_signature,
)
from ..emitting import Event
from ..events import CLAIM_FAILED, CLAIM_REPEATED
from ..exceptions import (
    AlreadyClaimed,
    CelerySafeError,
    ConfigurationError,
    IdempotencyConflict,
    InvalidResult,
    find_soft_time_limit,
)
from ..leases.claim import Claim, find_request
from ..leases.holder import HeldLock, decode_holder, plain_name
from ..leases.lease import clock
from ..leases.lease_table import LeaseTable
from ..locks.misuse import refuse_misplaced
from ..texts import describe_error, get_logger, storable
from ..transactions import TRIES, reconnect
from ..values import decode

logger: Final = get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: A placeholder in a key; in the key of a `with` block it would not be filled in.
_UNFILLED: Final = re.compile(r"\{[^\W\d][^{}]*\}")
#: Pause before a message that has met a run of its own id looks again, s.
PAUSE: Final = 0.05


class Found(NamedTuple):
    """
    The columns of a record that a claim needs.

    Attributes:
        left: Seconds until its lease ends; negative: it is over.
        is_free: Whether any caller may claim it: it failed, expired, or is orphaned.
    """

    state: str
    token: str
    holder: str
    digest: str
    result: str
    error: str
    left: float
    is_free: bool

    def held(self, key: str) -> HeldLock:
        """Return its current or last holder, and the rest of its lease."""
        return decode_holder(self.holder, HeldLock(key, self.token, max(0.0, self.left)))


class RecordTable(LeaseTable):
    """The records in one database."""

    purpose = "say what is done"
    models = ("IdempotencyRecord",)
    rows, named, ends = "records", "key", "ends_at"

    def __init__(self, alias: str) -> None:
        refuse_untested(alias, "record what is done once")
        super().__init__(alias)

    def find(self, key: str) -> Found | None:
        """Return what a claim needs of the record with this primary key; None: no record."""
        rows = queries.fetch(self.alias, "find_record", key=key)
        return Found(*rows[0]) if rows else None

    def peek(self, name: str) -> HeldLock | None:
        with self.errors("peek"):
            row = self.find(plain_name(name))
        return None if row is None else row.held(name)

    def execute(self, statement: str, key: str, **values: Any) -> bool:
        """Execute a statement on the record with this primary key; return whether it changed it."""
        return bool(queries.execute(self.alias, statement, key=key, **values))


#: Returns the one table of a database: the renewing thread tells stores apart by identity.
table_in = functools.lru_cache(RecordTable)


class RecordClaim(Claim):
    """
    The claim of a key, which :func:`idempotent` yields: one attempt to do the work.

    Attributes:
        asked: Whether the block has checked if the work is ours.
    """

    table: RecordTable

    def __init__(
        self, key: str, table: RecordTable, seconds: float, keep: timedelta | None, digest: str = ""
    ) -> None:
        super().__init__(table, key, key, seconds)
        self._row, self._keep, self._digest = plain_name(key), keep, digest
        self.asked = False
        #: Why the result can't be stored; "": it can.
        self._error = ""
        self._sends_before = 0

    def __bool__(self) -> bool:
        self.asked = True
        return self.is_held

    def try_begin(self) -> HeldLock | None:
        """
        Claim the work, unless it is done; return the lock of another run that is doing it, or None.

        Raises:
            IdempotencyConflict: The key was used for a call with other arguments.
            InvalidResult: The work is done, but its result could not be stored.
            WrongTransaction: Inside ``atomic()``, where other processes would not see the claim.
            ConfigurationError: The code that calls this is already doing the same work; or the
                database has no table for records.
        """
        task, what = get_current_task(), f"idempotent({self.key!r})"
        instead = "Call it outside atomic(); the work itself may open one."
        holder = self.prepare(task, None if task is None else task.request, what, instead)
        try:
            found = self._take(holder)
            if isinstance(found, HeldLock):
                return found
            if found is None:
                self.is_repeat = True
                self._emit(CLAIM_REPEATED)
            else:
                self.asked_at, self._sends_before = found, _count_own_sends()
                self.begin()
        except CelerySafeError:
            raise
        except BaseException as error:
            interrupted = find_soft_time_limit(error)
            if interrupted is None and isinstance(error, DatabaseError):
                self.table.check_migrated(error)
                raise
            # A soft time limit, or no thread could be started. The claim may have been written.
            reconnect(self.table.alias)  # it may have been interrupted anywhere
            self.fail(interrupted or error)
            if interrupted is None:
                raise
            raise interrupted from error
        return None

    def succeed(self, result: Any = None) -> None:
        """
        Record the end of work that raised no error, unless :meth:`finish` has recorded it.

        If the result can't be stored, the work is recorded as done without it. If the task has
        re-sent itself, such as by ``retry(throw=False)``, the work is not done, but put back.

        Raises:
            InvalidResult: The result can't be stored.
            WrongTransaction: The transaction of :meth:`finish` was rolled back.
        """
        if self.is_of_parent():
            return  # after a bare os.fork() the child also leaves the block
        if self.is_finished:
            self.check_committed()
            return
        if _count_own_sends() > self._sends_before:
            self.end()
            self.fail(Retry("The task has re-sent itself"))
            return
        try:
            self.finish(result)
        except InvalidResult as error:
            self._error = storable(error.reason)
            self._record_done("")
            raise

    def fail(self, error: BaseException) -> None:
        """Record the end of work that raised an error, unless :meth:`finish` has recorded it."""
        reason, failed = describe_error(error), self._rows().failed().filter(token=self.token)
        text = storable(reason)
        try:
            if self.end_by(lambda: self._end("failed", text), failed.exists, patient=False):
                if not isinstance(error, TaskPredicate):  # a retry is not yet a failure
                    self._emit(CLAIM_FAILED, error=reason)
            elif not self.is_done(patient=False):
                self.find_new_holder()
        except DatabaseError as failure:
            what = "Could not record that %r failed; it is free when its lease is over: %s"
            logger.warning(what, self.key, describe_error(failure))

    def _take(self, holder: str) -> float | HeldLock | None:
        """
        Claim the record.

        Returns:
            The time of the request, by the monotonic clock, if the record is claimed; the lock
            with its current holder; or None if the work is done.
        """
        table, asked_at = self.table, 0.0
        ours = {"token": self.token, "holder": holder, "digest": self._digest}
        for _ in range(TRIES):
            before, asked_at = asked_at, clock.now()
            row = table.find(self._row)
            if row is not None and row.token == self.token:
                return before  # the last try was written, and its answer was lost
            if row is not None and not row.is_free:
                return self._read(row)
            statement = "add_record" if row is None else "claim_record"
            if table.execute(statement, self._row, lease=self.seconds, **ours):
                return asked_at
        raise CelerySafeError(
            f"The record of {self.key!r} was changed {TRIES} times while it was to be claimed: it "
            f"is being added and forgotten again and again. Find out by whom."
        )

    def _read(self, row: Found) -> HeldLock | None:
        """Return the lock of the run that is doing the work; None: the work is done."""
        held = row.held(self.key)
        if self._digest and row.digest and self._digest != row.digest:
            raise IdempotencyConflict(self.key, str(held.holder))
        if row.state == "running":
            return held
        if row.error:
            raise InvalidResult(self.key, row.error)
        self.result = decode(row.result)
        return None

    def _write_done(self, text: str) -> bool:
        return self._end("done", self._error, result=text, cursor="")

    def _end(self, state: str, error: str, *, result: str = "", cursor: str | None = None) -> bool:
        """Record that the claimed work has ended; False if the claim had lost the record."""
        keep = None if self._keep is None else self._keep.total_seconds()
        values = {"token": self.token, "result": result, "cursor": cursor, "keep": keep}
        return self.table.execute("end_record", self._row, state=state, error=error, **values)

    def _emit(self, event: Event, **fields: Any) -> None:
        task_id = getattr(find_request(), "id", None)
        event.emit(Claim, key=self.key, task_id=task_id, **fields)


def _count_own_sends() -> int:
    """Return how often the task that runs here has re-sent itself, as ``retry(throw=False)``."""
    task = get_current_task()
    if task is None:
        return 0
    request: Any = task.request
    # With trail=False there are no children.
    again: int = sum(one.id == request.id for one in request.children)
    return again + int(getattr(request, "safe_retries", 0))


def record_table(using: str | None = None) -> RecordTable:
    """Return the record table in database ``using``; None: the one the router writes to."""
    from ..models.idempotency import IdempotencyRecord  # needs the app registry

    return table_in(router.db_for_write(IdempotencyRecord) if using is None else using)


def forget_record(key: str, *, using: str | None = None) -> bool:
    """
    Delete the record of some work, so that the next caller does the work again.

    Args:
        key: The whole key; that of a decorated task begins with the task's name and ``:``. The
            admin lists the keys.
        using: Database alias of the records; None: the database that the router writes to.

    Returns:
        True if the record was deleted, which is also logged as ``record_forgotten``; False if
        there was none.

    Raises:
        AlreadyClaimed: A process does the work now. Try again when it has ended, or its lease has.
    """
    table = record_table(using)
    if table.at(key).idle().forget():
        return True
    holder = table.peek(key)
    if holder is None:
        return False
    raise AlreadyClaimed(key, str(holder.holder), holder.holder.task_id, holder.remaining or 0.0)


class Idempotent:
    """
    Work that is done once for each key: a context manager and a decorator.

    Made by :func:`idempotent`.
    """

    def __init__(
        self,
        key: Key | conf.Unset,
        timeout: conf.Duration | conf.Unset,
        ttl: conf.Duration | conf.Unset | None,
        using: str | None,
    ) -> None:
        self._key = checked_key(key)
        self._timeout = timeout if timeout is conf.UNSET else conf.LEASE.seconds(timeout, "timeout")
        self._ttl = ttl if ttl is conf.UNSET else conf.TTL.delta(ttl, "ttl")
        #: Alias of the records' database; None: the database that the router writes to.
        self.using = using
        self._blocks = ExitStack()

    def __enter__(self) -> Claim:
        return self._blocks.enter_context(self._block())

    def __exit__(self, *exc_info: Any) -> None:
        self._blocks.__exit__(*exc_info)

    @contextmanager
    def _block(self) -> Iterator[Claim]:
        """Claim the work, hold the claim while the block does it, and record how that ends."""
        key = self._key
        if not isinstance(key, str) or not key:
            got = "no key" if key is conf.UNSET else f"the key {key!r}"
            raise ConfigurationError(
                f"`with idempotent(...)` got {got}: it needs a string, not empty, that names "
                f"the work. Only the decorator takes lists and functions."
            )
        if found := _UNFILLED.search(key):
            raise ConfigurationError(
                f"`with idempotent({key!r})` does not fill in placeholders, so {found[0]} would "
                f"be the same for every call. Write the key as an f-string."
            )
        claim = self._make_claim(key)
        self._begin(claim, get_current_task(), _message_of(find_request()))
        if not claim.is_repeat:
            with claim.holding(claim.fail):
                yield claim
                claim.succeed()
            return
        yield claim
        if not claim.asked:
            warnings.warn(
                f"A block ran without checking its claim, although {key!r} was already done. "
                f"Write: with idempotent(...) as claim: if claim: ...",
                RuntimeWarning,
                stacklevel=5,
            )

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate ``function``: it runs once for each key."""
        refuse_misplaced(function, "@idempotent", "it would count as done")
        refuse_lock_below(function, "@idempotent")
        check_key_names(function, self._key)

        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = self._run(once, function, args, kwargs)
            return result

        show_signature(once, own_signature(function))
        once.idempotent = self  # type: ignore[attr-defined]
        return once

    def _run(self, decorated: Function, function: Function, args: Args, kwargs: Kwargs) -> Any:
        task, request, bound = find_call(decorated, function, args)
        message, sent = _message_of(request), None
        if message is not None:
            sent = (*(message.args or ()), *(message.kwargs or {}).values())
        given, named, serializer = sent_arguments(task, message, args[bound:], kwargs)
        call: Any = {"args": given, "kwargs": named, "serializer": serializer, "sent": sent}
        name = name_of(task, function) if task is None else task.name
        guarded = Guarded(function, DEFAULTS._replace(key=self._key), bound)
        key, digest = key_and_digest(name, guarded, **call)
        claim = self._make_claim(f"{name}:{key}", digest)
        self._begin(claim, task, message)
        if claim.is_repeat:
            return claim.result
        with claim.holding(claim.fail):
            result = run_for(request, function, args, kwargs)
            claim.succeed(result)
        return result

    def _begin(self, claim: RecordClaim, task: Any, message: Context | None) -> None:
        """Claim the work, or find it done; re-queue the message if another process is doing it."""
        held = claim.try_begin()
        waits_until = time.monotonic() + copies.OWN_RUN_WAIT
        while held is not None:
            if message is None:
                raise AlreadyClaimed(
                    claim.key, str(held.holder), held.holder.task_id, held.remaining or 0.0
                )
            # A retry without delay may arrive before the run that sent it has ended.
            if held.holder.task_id != message.id or time.monotonic() > waits_until:
                copies.requeue_self(task, message, held)
            time.sleep(PAUSE)
            held = claim.try_begin()

    def _make_claim(self, key: str, digest: str = "") -> RecordClaim:
        seconds = conf.get("LOCK_TIMEOUT") if self._timeout is conf.UNSET else self._timeout
        keep = conf.retention("records") if self._ttl is conf.UNSET else self._ttl
        return RecordClaim(key, record_table(self.using), seconds, keep, digest)


def _message_of(request: Context | None) -> Context | None:
    """Return the request if its message could be redelivered; otherwise None."""
    # Eager runs, .apply() and direct calls have no message.
    if request is None or request.called_directly or request.is_eager:
        return None
    return request


@overload
def idempotent(function: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def idempotent(
    first: str | list[str] | tuple[str, ...] | conf.Unset = conf.UNSET,
    /,
    *,
    key: Key | conf.Unset = conf.UNSET,
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    ttl: conf.Duration | conf.Unset | None = conf.UNSET,
    using: str | None = None,
) -> Idempotent: ...
def idempotent(
    first: Any = conf.UNSET,
    /,
    *,
    key: Any = conf.UNSET,
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    ttl: conf.Duration | conf.Unset | None = conf.UNSET,
    using: str | None = None,
) -> Any:
    """
    Do some work once for each key, no matter how many times it is called.

    A record in the database says whether the work is running, under a lease that a background
    thread renews, or done. No lock is held while the work runs. A repeat does nothing and gets
    the stored result.

    Put the decorator below ``@shared_task``, with or without options, and below
    ``@single_instance``. A ``with`` block gets a :class:`Claim`, which is
    truthy if the work is ours to do: write ``if claim:``.

    While one process does the work, a second worker that gets a message for it ends its task
    at once. That message is redelivered under the same id when the lease has expired, and code
    before a ``with`` block then runs again. Outside tasks, a second caller gets
    AlreadyClaimed.

    After an error, the next caller may do the work at once; after a death, when the lease has
    expired. So effects outside the database may happen twice. Writes to this database happen
    exactly once if :meth:`Claim.finish` is called in the same
    ``atomic()`` (in a decorated function: ``current_claim().finish(result)``).

    Args:
        key: The name of the work. In a ``with`` block a text, used unchanged. For the
            decorator as in ``single_instance``: unset (all arguments), a format string
            over argument names, a list of names, or (by name, as ``key=``) a function of
            the arguments; it is prefixed with the task's name. Using a key again with other
            arguments raises IdempotencyConflict.
        timeout: The lease, seconds or timedelta; unset: ``LOCK_TIMEOUT``.
        ttl: How long the work counts as done, seconds or timedelta; None: for ever; unset:
            ``RETENTION["records"]``. Choose a time longer than any repeat can be delayed.
        using: Database alias of the records; None: the database that the router writes to.

    Raises:
        TypeError: The decorator is above ``@shared_task`` or ``@single_instance``.
        ConfigurationError: An option is not valid, or the key names no argument.

    Example:
        >>> from django_celery_safe import idempotent
        >>> with idempotent("invoice:42") as claim:
        ...     if claim:
        ...         print("charging")
        ...         claim.finish({"charge": "ch_1"})
        charging
        >>> with idempotent("invoice:42") as claim:
        ...     print(bool(claim), claim.result)
        False {'charge': 'ch_1'}

    Source:
        "Celery: lessons learned", tasks that may be delivered more than once.
    """
    if callable(first) or is_django_task(first):
        return Idempotent(conf.UNSET, timeout, ttl, using)(first)
    if first is not conf.UNSET:
        if key is not conf.UNSET:
            raise ConfigurationError(f"idempotent got two keys, {first!r} and {key!r}.")
        key = first
    return Idempotent(key, timeout, ttl, using)
