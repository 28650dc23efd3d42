"""Locks in the admin, read from their store at each request."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import Any, Final

from django.contrib import admin
from django.contrib.admin.utils import quote
from django.core.paginator import Paginator
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.utils.html import format_html
from django.utils.translation import gettext, pgettext_lazy
from django.utils.translation import gettext_lazy as _

from ..exceptions import CelerySafeError, ConfigurationError, LockBackendError
from ..leases.holder import HeldLock
from ..locks import find_lock, iter_locks, release_lock
from ..models.locks import Lock
from ..texts import printable
from .pages import MOST_COUNTED, ReadOnlyAdmin, columns, permission, row_action

#: HTTP status of a page whose store did not answer.
NOT_AVAILABLE: Final = 503


class HeldLocks(list[Any]):
    """Locks that were read, with what Django's list asks of a queryset."""

    def _clone(self) -> HeldLocks:
        return self

    def filter(self, *, pk__in: list[str]) -> HeldLocks:
        return HeldLocks(row for row in self if row.pk in pk__in)


@admin.register(Lock)
class LockAdmin(ReadOnlyAdmin):
    """The locks that are held: by whom, since when, and whether the holder lives."""

    list_display: Any = (
        "link",
        *columns(Lock, "held.holder.process held.age held.remaining held.liveness"),
        *columns(Lock, "held.holder.task held.holder.arguments"),
    )
    list_display_links = None
    paginator = Paginator
    search_fields = ("name",)
    search_help_text = _("The beginning of a lock's name.")
    fields = readonly_fields = ("name", *list_display[1:], *columns(Lock, "held.holder.task_id"))
    actions = ("release",)
    has_release_permission = permission("release")

    def get_urls(self) -> list[Any]:
        urls: list[Any] = super().get_urls()
        for url in urls:
            url.callback = self._reading_store(url.callback)
        return urls

    def _reading_store(self, view: Callable[..., HttpResponse]) -> Callable[..., HttpResponse]:
        """Return a view that says so if the locks can't be read: no lock is not the same."""

        @wraps(view)
        def answer(request: HttpRequest, *args: Any, **options: Any) -> HttpResponse:
            try:
                return view(request, *args, **options)
            except CelerySafeError as error:
                status = NOT_AVAILABLE if isinstance(error, LockBackendError) else None
                title = gettext("The locks can't be read")
                return self.page(request, "error", title, {"error": error}, status)

        # Locks in a database can't be queried inside a transaction, even with ATOMIC_REQUESTS.
        answer._non_atomic_requests = connections  # type: ignore[attr-defined]
        return answer

    def get_queryset(self, request: HttpRequest) -> Any:
        return Lock.objects.none()

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        """Read the locks whose name begins so, but no markers."""
        try:
            found = list(islice(iter_locks(search_term or None), MOST_COUNTED))
        except ConfigurationError:
            # A store that can't list its locks finds one by its whole name.
            if not search_term:
                raise
            found = list(filter(None, [find_lock(search_term)]))
        found.sort()
        return HeldLocks(_as_row(each) for each in found if each.kind != "marker"), False

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return a lock of this name, held or not: its history exists in either case."""
        return Lock(name=object_id) if object_id.isprintable() else None

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        if not hasattr(obj, "held"):
            obj.held = find_lock(obj.pk)
        return self.fields if obj.held else ("name", "nobody")

    @admin.display(description=_("lock"))
    def link(self, row: Any) -> str:
        """The name, as a link to its page; a name that is not printable can't be in a URL."""
        link = '<a href="{}/change/">{}</a>' if row.pk == row.held.name else "{1}"
        return format_html(link, quote(row.pk), row.pk)

    @admin.display(description=_("holder"))
    def nobody(self, row: Any) -> str:
        """What the page of a free lock shows."""
        return gettext("Nobody holds this lock now.")

    @row_action(
        pgettext_lazy("action", "Release"),
        _("Released"),
        refused=_("it ended meanwhile, or someone else holds it now"),
        ask=_(
            "The holders are not stopped: each finds out at its next renewal. Until then a second "
            "may run beside it."
        ),
    )
    def release(self, row: Any) -> bool:
        """Free a lock, whether or not its holder lives."""
        return release_lock(row.held)


def _as_row(held: HeldLock) -> Any:
    """Return a lock as an object for Django's admin, with a name that can be shown and logged."""
    row: Any = Lock(name=printable(held.name))
    row.held, row.token = held, held.token
    return row
