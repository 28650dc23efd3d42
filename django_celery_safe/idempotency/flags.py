"""
:class:`IdempotentMixin`: a flag on a row records whether work was done for that row.

The mixin is a plain class, not a model, so that it can be imported before the apps
are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast

from celery.exceptions import Retry
from django.db import OperationalError, connections, router, transaction
from django.db.models import BooleanField, DateTimeField, QuerySet
from django.utils import timezone

from .. import conf
from ..databases import refuse_untested, says_taken
from ..delivery.copies import is_requeued
from ..emitting import Event
from ..events import ALREADY_DONE, ONCE_FAILED
from ..exceptions import ConfigurationError, LockNotAcquired, WrongTransaction
from ..transactions import Attempts, busy_timeout, is_transaction_open, lock_whole

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

    # Migrations of the models that use it contain this path, so it must not change.
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
        Run the block once for the row ``pk``, and record that in its ``flag``.

        Yields the row, read fresh under a row lock, or None if the flag says that the work
        was done: write ``if row:``. If two callers arrive at once, the second one waits.

        ``"at_least_once"``: the block runs inside the transaction, and the flag
        is saved only if the block succeeds. If the process dies after the
        effect and before the commit, the block runs again.
        ``"at_most_once"``: the flag is committed first, and then the block runs outside
        the transaction. If the process dies or the block fails after that, the effect
        may never happen; a failure is logged at ERROR and sent as ``once_failed``. A
        retry would find the flag set, so raising ``Retry`` in the block is an error.

        The cost: with ``"at_least_once"``, the row (and its parents' rows, with multi-table
        inheritance), on SQLite the whole database, is locked while the block runs. For slow
        effects use :func:`idempotent`, which keeps no locks. Only the flag is written: the block
        saves any other change itself.

        The work is done again if the flag becomes False: you reset it, or ``save()`` on an
        instance that was read earlier writes its old columns back.

        Args:
            pk: Primary key of the row.
            flag: Name of a BooleanField (true: done), or of a DateTimeField with
                ``null=True`` (not null: done, set to the current time).
            guarantee: Which of the two to guarantee; after a crash only one of them can hold.
            nowait: Raise at once if another transaction has locked the row, instead of waiting.
            using: Database alias; None: the database that the router writes to.
            durable: Require that this is the outermost transaction, so that the flag
                is committed when the block has ended. False: an outer transaction is
                allowed, and decides whether the flag is committed.

        Raises:
            TypeError: ``pk`` is a row instead of its key.
            WrongTransaction: It was called inside another transaction, with ``durable=True``.
            DoesNotExist: The model has no such row.
            ConfigurationError: ``flag`` is not a flag of the model; the database is neither
                PostgreSQL, MariaDB, MySQL nor SQLite; or the block raised Retry under
                ``"at_most_once"``.
            OperationalError: With ``durable=False`` under REPEATABLE READ or SERIALIZABLE,
                another process changed the row after the outer transaction had started; run the
                outer transaction again.
            LockNotAcquired: Another transaction has locked the row, and ``nowait`` is True.

        Source:
            "Celery: lessons learned", the welcome e-mail (is_welcome_email_sent).
        """
        model = cast("type[Model]", cls)
        if isinstance(pk, model):
            raise TypeError(
                f"{model._meta.label}.do_once got a row, {pk!r}, instead of its primary key. Give "
                f"row.pk: do_once reads the row again, under its lock."
            )
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
        once = _Once(model, pk, flag, alias, nowait=nowait)
        if durable and is_transaction_open(connections[alias]):
            raise WrongTransaction(
                f"do_once({once.label}) was called inside another transaction on {alias!r}, or "
                f"with autocommit off there: a rollback would clear the flag. Call it outside "
                f"atomic(), or pass durable=False to let the outer transaction decide."
            )
        block = once.at_least_once() if guarantee == "at_least_once" else once.at_most_once()
        return cast("AbstractContextManager[Self | None]", block)


class _Once:
    """One use of :meth:`IdempotentMixin.do_once`."""

    def __init__(self, model: type[Model], pk: Any, flag: str, alias: str, *, nowait: bool) -> None:
        self._model, self._pk, self._flag, self._alias = model, pk, flag, alias
        self._nowait = nowait

    @contextmanager
    def at_least_once(self) -> Iterator[Model | None]:
        for attempt in Attempts(self._alias, f"do_once({self.label})"):
            with attempt, self._locked_row() as row:
                attempt.is_won = True
                if self._is_done(row):
                    self._emit(ALREADY_DONE)
                    yield None
                    return
                yield row
                self._set_flag(row)

    @contextmanager
    def at_most_once(self) -> Iterator[Model | None]:
        for attempt in Attempts(self._alias, f"do_once({self.label})"):
            with attempt, self._locked_row() as row:
                was_done = self._is_done(row)
                if not was_done:
                    self._set_flag(row)
                attempt.is_written = True
        if was_done:
            self._emit(ALREADY_DONE)
            yield None
            return
        try:
            yield row
        except BaseException as error:
            self._emit(ONCE_FAILED, error=error)
            if isinstance(error, Retry) or is_requeued(error):
                raise ConfigurationError(
                    f"The block of do_once({self.label}) asked for a retry under at_most_once, "
                    f"but the retry would find {self._flag} set and do nothing. Handle the "
                    f'failure in the block, or use guarantee="at_least_once".'
                ) from error
            raise

    @property
    def label(self) -> str:
        return f"{self._model._meta.label}, pk={self._pk!r}, {self._flag!r}"

    @contextmanager
    def _locked_row(self) -> Iterator[Model]:
        """Lock the row in a transaction while the block runs."""
        with ExitStack() as beginning:
            if self._nowait:
                # With transaction_mode IMMEDIATE, another process's lock makes BEGIN itself fail.
                beginning.enter_context(self._fail_at_once())
            with transaction.atomic(using=self._alias):
                # Without row locks, the transaction's first statement has to be a write: a write
                # waits for the database's write lock before the flag is read. With a read first,
                # it would fail with "database is locked".
                lock_whole(self._alias, self._model)
                # Rows that refer to this one may be written during the block, where a row lock
                # can allow that: its key stays.
                no_key = connections[self._alias].features.has_select_for_no_key_update
                row = self._rows().select_for_update(nowait=self._nowait, no_key=no_key).get()
                beginning.close()
                yield row

    def _rows(self) -> QuerySet[Model]:
        # Without a manager: the model's manager may hide rows, or join other tables, whose rows
        # would be locked too.
        return QuerySet(self._model, using=self._alias).filter(pk=self._pk)

    @contextmanager
    def _fail_at_once(self) -> Iterator[None]:
        try:
            with busy_timeout(self._alias, 0):
                yield
        except OperationalError as error:
            if not says_taken(error):
                raise
            name = f"{self._model._meta.label} pk={self._pk!r}"
            raise LockNotAcquired(name, "someone else") from error

    def _is_done(self, row: Model) -> bool:
        # False and None: not done; True and any time: done.
        return getattr(row, self._flag) not in (None, False)

    def _set_flag(self, row: Model) -> None:
        field = self._model._meta.get_field(self._flag)
        value = True if isinstance(field, BooleanField) else timezone.now()
        # Not save(): if a receiver or an overridden save() failed here, the flag would be
        # rolled back after the effect.
        self._rows().update(**{self._flag: value})
        setattr(row, self._flag, value)

    def _emit(self, event: Event, **fields: Any) -> None:
        label = self._model._meta.label
        event.emit(self._model, model=label, pk=self._pk, flag=self._flag, **fields)


def _check_flag(model: type[Model], name: str) -> None:
    flags = [
        field.name
        for field in model._meta.get_fields()
        if isinstance(field, BooleanField) or (isinstance(field, DateTimeField) and field.null)
    ]
    if name not in flags:
        raise ConfigurationError(
            f"{model._meta.label}.{name} can't say whether a thing was done. A flag is a "
            f"BooleanField, or a DateTimeField with null=True; the model has: "
            f"{', '.join(flags) or 'none'}.{conf.did_you_mean(name, flags)}"
        )
