"""Leases in the rows of one of this package's tables."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar, Final

from django.apps import apps
from django.db import Error, connections, transaction
from django.db.models import F

from .. import queries, transactions
from ..databases import Now
from ..exceptions import CelerySafeError
from .holder import plain_name
from .lease import LeaseStore, Renewals

#: Changes to a row whose holder, a process, has died.
DIED: Final[dict[str, Any]] = {"deaths": F("deaths") + 1, "last_death": F("holder")}


class DatabaseLeases(LeaseStore):
    """
    Leases in a database, with what the renewing thread needs.

    Args:
        where: The store's name in messages.
        alias: Alias of the database.
    """

    connects_threads: ClassVar[bool] = True
    client_errors = (Error,)
    #: The purpose of the database, such as "hold the locks".
    purpose: ClassVar[str]
    #: Names of the models whose tables the purpose requires, first that of the leases.
    models: ClassVar[tuple[str, ...]]

    def __init__(self, where: str, alias: str) -> None:
        self.where, self.alias = where, alias

    def all(self) -> Any:
        """Return a queryset of all rows of the leases."""
        model: Any = apps.get_model("django_celery_safe", self.models[0])
        return model.objects.using(self.alias)

    def check_migrated(self, error: Exception) -> None:
        """Raise an error that explains a database error, if a missing table caused it."""
        transactions.refuse_unmigrated(self.alias, self.purpose, self.models, error)

    def explain(self, action: str, error: Exception) -> CelerySafeError:
        # The next use opens a new connection in place of a broken one.
        connections[self.alias].close_if_unusable_or_obsolete()
        return super().explain(action, error)

    def leave_pool(self) -> None:
        transactions.leave_pool(self.alias)

    @property
    def renews(self) -> bool:  # type: ignore[override]
        # Inside a TestCase the row is not committed, so another thread can't see it.
        return not transactions.in_testcase_only(self.alias)

    def close(self) -> None:
        if not connections[self.alias].in_atomic_block:
            connections[self.alias].close()


class LeaseTable(DatabaseLeases):
    """
    The leases in the rows of one table, whose queryset has ``claimed(*tokens)``.

    A ``peek`` returns the last holder of a row, even if nobody holds it now.

    Args:
        alias: Alias of the database.
    """

    early: ClassVar[float] = 0.002  # two ticks of SQLite's clock
    #: The name of the rows in messages, such as "records".
    rows: ClassVar[str]
    #: The columns of a row's name and of the end of its lease.
    named: ClassVar[str]
    ends: ClassVar[str]

    def __init__(self, alias: str) -> None:
        super().__init__(f'the {self.rows} in DATABASES["{alias}"]', alias)

    def at(self, name: str) -> Any:
        """Return a queryset of the row with this name: one row or none."""
        return self.all().filter(**{self.named: plain_name(name)})

    def move(self, name: str, token: str, **values: Any) -> bool:
        """Record how far the work of a row got, which goes on; return whether its claim held it."""
        values |= {self.named: plain_name(name), "token": token}
        return bool(queries.execute(self.alias, f"move_{self.rows}", **values))

    def extend(self, renewals: Renewals, within: float | None = None) -> list[bool | None]:
        alike: dict[float, dict[str, str]] = {}
        for name, token, seconds in renewals:
            alike.setdefault(seconds, {})[token] = plain_name(name)
        found: dict[str, bool | None] = {}
        with self.errors("extend"), transactions.busy_timeout(self.alias, within):
            for seconds, names in alike.items():
                found |= self._extend(names, timedelta(seconds=seconds))
        return [found.get(token, False) for _, token, _ in renewals]

    def _extend(self, names: dict[str, str], lease: timedelta) -> dict[str, bool | None]:
        """
        Extend the leases of rows that nobody has locked.

        Args:
            names: The name of each row by its token.

        Returns:
            By token: True for each row that was extended, None for each that is locked.
        """
        held = self.all().claimed(*names).filter(**{f"{self.named}__in": list(names.values())})
        skip = connections[self.alias].features.has_select_for_update_skip_locked
        for attempt in transactions.Attempts(self.alias, "The renewal of leases"):
            with attempt, transaction.atomic(using=self.alias):
                transactions.lock_whole(self.alias, held.model)
                rows = list(held.select_for_update(skip_locked=skip).values_list("token", "pk"))
                # By the keys: MariaDB would read the whole table for a subquery.
                ids = [pk for _, pk in rows]
                self.all().filter(pk__in=ids).update(**{self.ends: Now() + lease})
        keys = {token for token, _ in rows}
        locked = held.values_list("token", flat=True) if len(keys) < len(names) else ()
        return {**dict.fromkeys(locked), **dict.fromkeys(keys, True)}
