"""
:class:`IdempotentMixin`: a flag on a row says whether a thing was done for it.

A plain class, not a model, so that it can be imported before the apps are
loaded.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

from celery.exceptions import Retry
from django.core.exceptions import FieldDoesNotExist
from django.db import OperationalError, connections, router, transaction
from django.db.models import BooleanField, DateTimeField, F, QuerySet
from django.utils import timezone

from ..databases import refuse_untested
from ..delivery.copies import is_requeued
from ..emitting import Event
from ..events import ALREADY_DONE, DONE_ONCE, ONCE_FAILED
from ..exceptions import (
    ConfigurationError,
    IdempotencyError,
    LockNotAcquired,
    WrongTransaction,
)
from ..transactions import attempts, busy_timeout, in_atomic, is_manual, leave_inherited

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from django.db.models import Model

Guarantee: TypeAlias = Literal["at_least_once", "at_most_once"]


class IdempotentMixin:
    """
    Adds :meth:`do_once` to a model.

    Example::

        class User(IdempotentMixin, AbstractUser):
            is_welcome_email_sent = models.BooleanField(default=False)
    """

    # Migrations of the models that use it write this path down for ever.
    __module__ = "django_celery_safe"

    @classmethod
    def do_once(
        cls,
        pk: Any,
        flag: str,
        *,
        guarantee: Guarantee = "at_least_once",
        nowait: bool = False,
        using: str | None = None,
        durable: bool = True,
    ) -> AbstractContextManager[Self | None]:
        """
        Do the block once for the row ``pk``, and note that in its ``flag``.

        Yields the row, read fresh under a row lock, or None if the flag says it
        was done: write ``if row:``. Two that come at once wait for each other.

        ``"at_least_once"``: the block runs inside the transaction, and the flag
        is saved when it ends well, and only then. If the process dies after the
        effect and before the commit, the block runs again.
        ``"at_most_once"``: the flag is committed before the block runs, outside
        the transaction. If the process dies or the block fails after that, the
        effect never happens, which is logged at ERROR and sent as ``once_failed``. No
        ``Retry`` can help then, so one raised in the block is an error.

        What it costs: with ``"at_least_once"`` the row (that of its parents too, with
        multi-table inheritance), and on SQLite the whole database, is locked while the
        block runs; everyone else who wants to write there waits. For slow effects use
        :func:`idempotent`, which locks nothing meanwhile. Only the flag is written: what
        else the block changes on the row, it saves itself.

        What takes the flag back lets it be done again: to set it to False on purpose, and a
        ``save()`` of an instance that was read before, which writes all its columns.

        Args:
            pk: Primary key of the row.
            flag: Name of a BooleanField (true: done), or of a DateTimeField with
                ``null=True`` (not null: done, set to the current time).
            guarantee: Which way it fails where it can't be both.
            nowait: Raise at once if someone else has the row, instead of waiting.
            using: Database alias; unset: the one the router writes to.
            durable: Insist on being the outermost transaction, so that the flag
                is committed when the block has ended. False opts out: then the
                outer transaction decides.

        Raises:
            WrongTransaction: It stands inside another ``atomic()``.
            DoesNotExist: The model has no such row.
            ConfigurationError: ``flag`` is not a flag of the model.
            OperationalError: With ``durable=False`` under REPEATABLE READ or SERIALIZABLE,
                someone changed the row since the outer transaction began; run that again.
            BackendNotSupported: The database is neither PostgreSQL nor SQLite.
            LockNotAcquired: Someone else has the row, and ``nowait`` is on.
            IdempotencyError: The block raised Retry under ``"at_most_once"``.

        Source:
            "Celery: lessons learned", the welcome e-mail (is_welcome_email_sent).
        """
        model = cast("type[Model]", cls)
        _check_flag(model, flag)
        if guarantee not in ("at_least_once", "at_most_once"):
            raise ConfigurationError(
                f'guarantee={guarantee!r} is not known; it can be "at_least_once" or '
                f'"at_most_once".'
            )
        if guarantee == "at_most_once" and not durable:
            raise ConfigurationError(
                'guarantee="at_most_once" commits the flag before the block runs, which it can\'t '
                "inside another transaction: leave durable=False out."
            )
        alias = router.db_for_write(model) if using is None else using
        refuse_untested(alias, "do a thing once for a row")
        once = _Once(model, pk, flag, alias, nowait=nowait, durable=durable)
        block = once.at_least_once() if guarantee == "at_least_once" else once.at_most_once()
        return cast("AbstractContextManager[Self | None]", block)


class _Once:
    """One use of :meth:`IdempotentMixin.do_once`."""

    def __init__(
        self, model: type[Model], pk: Any, flag: str, alias: str, *, nowait: bool, durable: bool
    ) -> None:
        self._model, self._pk, self._flag, self._alias = model, pk, flag, alias
        self._nowait, self._durable = nowait, durable

    @contextmanager
    def at_least_once(self) -> Iterator[Model | None]:
        self._refuse_transaction()
        for attempt in attempts(self._alias, f"do_once({self._label})"):
            with attempt, self._locked_row() as row:
                attempt.win()
                if self._is_done(row):
                    self._emit(ALREADY_DONE)
                    yield None
                    return
                yield row
                self._set_flag(row)
        if in_atomic(self._alias):
            # The outer transaction decides.
            transaction.on_commit(partial(self._emit, DONE_ONCE), using=self._alias)
        else:
            self._emit(DONE_ONCE)

    @contextmanager
    def at_most_once(self) -> Iterator[Model | None]:
        self._refuse_transaction()
        for attempt in attempts(self._alias, f"do_once({self._label})"):
            with attempt, self._locked_row() as row:
                was_done = self._is_done(row)
                if not was_done:
                    self._set_flag(row)
        if was_done:
            self._emit(ALREADY_DONE)
            yield None
            return
        try:
            yield row
        except BaseException as error:
            self._emit_failed(error)
            if isinstance(error, Retry) or is_requeued(error):
                raise IdempotencyError(
                    f"The block of do_once({self._label}) asked to be run again under "
                    f"at_most_once, which would find {self._flag} set and do nothing. Handle the "
                    f'failure in the block, or use guarantee="at_least_once".'
                ) from error
            raise
        self._emit(DONE_ONCE)

    @property
    def _label(self) -> str:
        return f"{self._model._meta.label}, pk={self._pk!r}, {self._flag!r}"

    def _refuse_transaction(self) -> None:
        leave_inherited(self._alias)
        if self._durable and (in_atomic(self._alias) or is_manual(self._alias)):
            raise WrongTransaction(
                f"do_once({self._label}) stands inside another transaction on {self._alias!r}, or "
                f"autocommit is off there: a rollback would forget what was done. Call it outside "
                f"atomic(), or pass durable=False if the outer transaction is to decide."
            )

    @contextmanager
    def _locked_row(self) -> Iterator[Model]:
        """Lock the row in a transaction for the block."""
        with ExitStack() as beginning:
            if self._nowait:
                # With IMMEDIATE, it is the BEGIN that meets somebody else's lock.
                beginning.enter_context(self._fail_at_once())
            with transaction.atomic(using=self._alias):
                row = self._lock_row()
                beginning.close()
                yield row

    def _rows(self) -> QuerySet[Model]:
        # Of no manager: those of the model may hide rows, or join others, which would be
        # locked along.
        return QuerySet(self._model, using=self._alias).filter(pk=self._pk)

    def _lock_row(self) -> Model:
        connection = connections[self._alias]
        if connection.features.has_select_for_update:
            return self._rows().select_for_update(nowait=self._nowait).get()
        # Without row locks the transaction's first statement has to be a write:
        # it takes the database's write lock before the flag is read, and waits
        # for it, where a read first would end in "database is locked".
        # Of the row's own table: for a column of a parent's, Django reads first.
        table: Any = self._model._meta.concrete_model
        columns = table._meta.local_concrete_fields
        column = next(field.name for field in columns if not getattr(field, "generated", False))
        self._rows().update(**{column: F(column)})
        return self._rows().get()

    @contextmanager
    def _fail_at_once(self) -> Iterator[None]:
        try:
            with busy_timeout(self._alias, 0):
                yield
        except OperationalError as error:
            if not _says_taken(error):
                raise
            name = f"{self._model._meta.label} pk={self._pk!r}"
            raise LockNotAcquired(name, "someone else") from error

    def _is_done(self, row: Model) -> bool:
        value = getattr(row, self._flag)
        # False and None: not done; True and any moment: done.
        return value is not None and value is not False

    def _set_flag(self, row: Model) -> None:
        field = self._model._meta.get_field(self._flag)
        value = True if isinstance(field, BooleanField) else timezone.now()
        # Not save(): a receiver or an overridden save() that fails here would
        # take the flag back after the effect.
        self._rows().update(**{self._flag: value})
        setattr(row, self._flag, value)

    def _emit(self, event: Event) -> None:
        event.emit(self._model, model=self._model._meta.label, pk=self._pk, flag=self._flag)

    def _emit_failed(self, error: BaseException) -> None:
        ONCE_FAILED.emit(
            self._model,
            model=self._model._meta.label,
            pk=self._pk,
            flag=self._flag,
            error=error,
        )


def _says_taken(error: OperationalError) -> bool:
    """Return whether the database said that somebody else has the row, not that it can't answer."""
    cause: Any = error.__cause__
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    # PostgreSQL: lock_not_available. SQLite: SQLITE_BUSY, SQLITE_LOCKED. MySQL: NOWAIT.
    return (
        state == "55P03"
        or getattr(cause, "sqlite_errorcode", 0) & 0xFF in (5, 6)
        or getattr(cause, "args", ())[:1] == (3572,)
    )


def flag_names(model: type[Model]) -> list[str]:
    """Return the names of the fields that can say whether a thing was done."""
    return [
        field.name
        for field in model._meta.get_fields()
        if isinstance(field, BooleanField) or (isinstance(field, DateTimeField) and field.null)
    ]


def _check_flag(model: type[Model], name: str) -> None:
    flags = flag_names(model)
    if name in flags:
        return
    try:
        field: Any = model._meta.get_field(name)
    except FieldDoesNotExist:
        problem = "does not exist"
    else:
        kind = type(field).__name__
        null = " without null=True" if isinstance(field, DateTimeField) else ""
        problem = f"is a {kind}{null}"
    close = difflib.get_close_matches(str(name), flags, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    raise ConfigurationError(
        f"{model._meta.label}.{name} {problem}, so it can't say whether a thing was done. A flag "
        f"is a BooleanField, or a DateTimeField with null=True; the model has: "
        f"{', '.join(flags) or 'none'}.{guess}"
    )
