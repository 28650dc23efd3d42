""":func:`idempotent`: doing work once that has no row of its own, or is slow."""

from __future__ import annotations

import functools
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, ParamSpec, TypeVar, overload

from celery._state import get_current_task
from celery.app.task import Context

from .. import conf
from ..compat import is_django_task
from ..concurrency.guard import refuse_lock_below
from ..concurrency.keys import call_key
from ..concurrency.options import DEFAULTS, Guarded, Key, check_key_names, checked_key
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
from ..exceptions import AlreadyClaimed, ConfigurationError
from ..leases.claim import Claim, find_request
from ..locks.misuse import refuse_misplaced
from .records import RecordClaim, record_table

P = ParamSpec("P")
T = TypeVar("T")

#: A placeholder in a key; in the key of a `with` block it would not be filled in.
_UNFILLED: Final = re.compile(r"\{[^\W\d][^{}]*\}")
#: Pause before a message that has met a run of its own id looks again, s.
PAUSE: Final = 0.05


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
        name = name_of(task, function)
        guarded = Guarded(function, DEFAULTS._replace(key=self._key), bound)
        key = call_key(name, guarded, **call)
        # Arguments that can't be encoded, such as a method's self, are not part of the digest.
        digest = ""
        if self._key is not conf.UNSET:
            digest = call_key(name, guarded._replace(options=DEFAULTS), is_digest=True, **call)
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
