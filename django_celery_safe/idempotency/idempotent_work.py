""":func:`idempotent`: doing a thing once that has no row of its own, or is slow."""

from __future__ import annotations

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final, ParamSpec, TypeVar, overload

from celery import Task
from celery._state import get_current_task
from celery.app.task import Context

from .. import conf
from ..concurrency.decorator import refuse_misplaced
from ..concurrency.keys import call_key
from ..concurrency.options import Key, check_key_names, checked_key
from ..delivery.call import (
    find_call,
    name_of,
    run_for,
    sent_arguments,
    serializer_of,
)
from ..delivery.copies import begin_or_requeue, delete_markers
from ..exceptions import AlreadyClaimed, ConfigurationError, ExcInfo, IdempotencyError
from .claim import Claim
from .record_table import record_table

P = ParamSpec("P")
T = TypeVar("T")

#: What was meant to be filled in, in the key of a `with` block.
_UNFILLED: Final = re.compile(r"\{[^\W\d][^{}]*\}")


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
        self._timeout: float | conf.Unset = conf.UNSET
        if not isinstance(timeout, conf.Unset):
            self._timeout = conf.lease_seconds(timeout, "timeout")
        self._ttl = ttl if isinstance(ttl, conf.Unset) else conf.ttl(ttl, "ttl")
        #: Alias of the records' database; None: the one the router writes to.
        self.using = using
        self._claim: Claim | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Claim:
        key = self._key
        if not isinstance(key, str) or not key:
            raise ConfigurationError(
                f"`with idempotent(...)` got the key {key!r}: it needs a text that is not empty, "
                f"which stands for the work. Lists and functions are for the decorator."
            )
        if found := _UNFILLED.search(key):
            raise ConfigurationError(
                f"`with idempotent({key!r})` takes its key as it is, so {found[0]} would be the "
                f"same for all. Write it as an f-string."
            )
        if self._claim is not None:
            raise IdempotencyError(
                f"idempotent({key!r}) is in use by this very object. Make another one."
            )
        claim = self._make_claim(key)
        task = get_current_task()
        message = _message_of(None if task is None else task.request)
        self._begin(claim, task, message)
        with ExitStack() as stack:
            stack.enter_context(claim.working())
            if message is not None:
                delete_markers(task, message, claim.markers, of_claim=True)
            self._stack = stack.pop_all()
        self._claim = claim
        return claim

    def __exit__(self, *exc_info: *ExcInfo) -> None:
        claim, self._claim = self._claim, None
        if exc_info[0] is None and claim is not None and claim.is_repeat and not claim.asked:
            warnings.warn(
                f"A block ran although {claim.key!r} was done before, and did not ask. Write: "
                f"with idempotent(...) as claim: if claim: ...",
                RuntimeWarning,
                stacklevel=2,
            )
        self._stack.__exit__(*exc_info)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """Decorate ``function``: each call is done once for its key."""
        refuse_misplaced(function, "@idempotent", "it would count as done", above_lock=False)
        check_key_names(function, self._key)

        @functools.wraps(function)
        def once(*args: P.args, **kwargs: P.kwargs) -> T:
            result: T = self._run(once, function, args, kwargs)
            return result

        # Celery checks arguments at .delay() by getfullargspec, which looks only here.
        once.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        once.idempotent = self  # type: ignore[attr-defined]
        return once

    def _run(
        self,
        decorated: Callable[..., Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        task, request = find_call(decorated, function, args)
        message = _message_of(request)
        claim = self._claim_of_call(function, task, message, args, kwargs)
        self._begin(claim, task, message)
        with claim.working():
            if message is not None:
                delete_markers(task, message, claim.markers, of_claim=True)
            if not claim:
                return claim.result
            result = run_for(request, function, args, kwargs)
            if not claim.is_finished:
                claim.finish_with(result)
        return result

    def _begin(self, claim: Claim, task: Any, message: Context | None) -> None:
        """Claim the work, or find it done; if somebody else does it, let the message come back."""
        if message is not None:
            begin_or_requeue(claim.try_begin, task, message, claim.markers)
        elif (held := claim.try_begin()) is not None:
            raise AlreadyClaimed(
                claim.key, str(held.holder), held.holder.task_id, held.remaining or 0.0
            )

    def _claim_of_call(
        self,
        function: Callable[..., Any],
        task: Any,
        message: Context | None,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Claim:
        bound = bool(args) and isinstance(args[0], Task)
        name = name_of(task, function)
        args, kwargs = sent_arguments(task, message, args[bound:], kwargs)
        serializer = serializer_of(task)

        def key_by(rule: Key | conf.Unset, *, strict: bool = True) -> str:
            return call_key(
                name,
                function,
                rule,
                args,
                kwargs,
                bound=bound,
                serializer=serializer,
                strict=strict,
            )

        # What can't be sent, as with pickle or a method's self, tells no two calls apart.
        digest = "" if isinstance(self._key, conf.Unset) else key_by(conf.UNSET, strict=False)
        return self._make_claim(f"{name}:{key_by(self._key)}", digest)

    def _make_claim(self, key: str, digest: str = "") -> Claim:
        seconds, keep = self._timeout, self._ttl
        if isinstance(seconds, conf.Unset):
            seconds = conf.lock_timeout()
        if isinstance(keep, conf.Unset):
            keep = conf.ttl(conf.get("IDEMPOTENCY_RETENTION"), "IDEMPOTENCY_RETENTION")
        return Claim(key, record_table(self.using), seconds, keep, digest)


def _message_of(request: Context | None) -> Context | None:
    """Return the request if it has a message that could come back; None if not."""
    # Eager runs, .apply() and direct calls have none.
    if request is None or request.called_directly or request.is_eager:
        return None
    return request


@overload
def idempotent(function: Callable[P, T], /) -> Callable[P, T]: ...
@overload
def idempotent(
    key: str | list[str] | tuple[str, ...] | conf.Unset = conf.UNSET,
    /,
    *,
    timeout: conf.Duration | conf.Unset = conf.UNSET,
    ttl: conf.Duration | conf.Unset | None = conf.UNSET,
    using: str | None = None,
) -> Idempotent: ...
@overload
def idempotent(
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
    Do a thing once for each key, however often it is asked for.

    A record in the database says that it is being done, or is done. Nothing is locked
    while it is done: the record is claimed in a short transaction, under a lease that a
    background thread renews, and finished in another. A repeat gets the stored result,
    and does nothing.

    As a decorator it goes below ``@shared_task``, bare or with options, and below
    ``@single_instance``. As a context manager it yields a :class:`Claim`, which is
    truthy if the work is ours to do: write ``if claim:``.

    Who comes while somebody else does it: a task that runs for a message ends at once,
    and its message comes back when the lease is over, under the same id; it does what
    came before a ``with`` block again then. Outside of tasks it is AlreadyClaimed.

    An error in the work lets the next who comes do it. A process that dies leaves it to
    whoever comes after the lease. So what it does outside of the database may be done
    again if the process dies between that and the record; what it writes to this
    database is done exactly once if :meth:`Claim.finish` is called in the same
    ``atomic()`` (in a decorated function: ``current_claim().finish(result)``).

    Args:
        key: What stands for the work. In a ``with`` block a text, taken as it is. For the
            decorator as in ``single_instance``: unset (all arguments), a format string
            over argument names, a list of names, or (by name, as ``key=``) a function of
            the arguments; the task's name comes before it. The same key with other
            arguments is an IdempotencyConflict.
        timeout: The lease, seconds or timedelta; unset: ``LOCK_TIMEOUT``.
        ttl: For how long it stays done, seconds or timedelta; None: for ever; unset:
            ``IDEMPOTENCY_RETENTION``. After that it would be done again, so it has to be
            longer than a repeat can come late.
        using: Database alias of the records; unset: the one the router writes to.

    Raises:
        TypeError: It stands above ``@shared_task`` or ``@single_instance``.
        ConfigurationError: An option means nothing, or the key names what is no argument.

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
    if callable(first) and not isinstance(first, conf.Unset):
        return Idempotent(conf.UNSET, timeout, ttl, using)(first)
    if not isinstance(first, conf.Unset):
        if not isinstance(key, conf.Unset):
            raise ConfigurationError(f"idempotent got two keys, {first!r} and {key!r}.")
        key = first
    return Idempotent(key, timeout, ttl, using)
