"""Locks in the admin, read from their store at each request."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, Final

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.utils.translation import gettext as _

from ..exceptions import CelerySafeError, ConfigurationError, LockBackendError
from ..inspection.locks import RELEASE, LockRow, find_row, iter_rows
from ..leases.holder import GARBLED, TOKEN_LENGTH
from ..locks.stores import locate
from ..models.locks import Lock
from ..texts import printable
from .pages import ReadOnlyAdmin

#: Locks on one page.
PAGE: Final = 100
#: Maximum number of digits of a page number.
LONGEST_PAGE: Final = 9
#: HTTP status of a page whose store did not answer.
NOT_AVAILABLE: Final = 503
#: The columns of the list besides the name.
COLUMNS: Final = (
    "age", "time_left", "renewal", "kind", "process", "task", "arguments", "task_id", "fence",
)  # fmt: skip


@admin.register(Lock)
class LockAdmin(ReadOnlyAdmin):
    """The locks that are held: the holder, since when, and whether the holder renews them."""

    decisions = (RELEASE,)
    command = "manage.py celery_locks"

    def get_urls(self) -> list[Any]:
        urls: list[Any] = super().get_urls()
        # Locks in a database can't be queried inside a transaction, even with ATOMIC_REQUESTS.
        for url in urls:
            for alias in connections:
                transaction.non_atomic_requests(alias)(url.callback)
        return urls

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: Any = None
    ) -> Lock | None:
        """Return a lock of this name, held or not: its history exists in either case."""
        # Log entries have only printable names, and not every database can search for others.
        return Lock(name=object_id) if object_id.isprintable() else None

    def get_row(self, row: Any) -> LockRow:
        lock: LockRow = row.lock
        return lock

    def selection_of(self, row: Any) -> str:
        return str(row.selection)

    def together(self, row: Any) -> AbstractContextManager[Any]:
        # No transaction: locks may live in a database, where a release takes effect at once.
        return nullcontext()

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show a page of the locks, or apply a decision to some of them."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self._take_posted(request)
        return self._show(request, extra_context)

    def _take_posted(self, request: HttpRequest) -> HttpResponse:
        self._check_posted(request)
        there = HttpResponseRedirect(request.get_full_path())
        chosen = request.POST.getlist(ACTION_CHECKBOX_NAME)
        names = request.POST.getlist("action")
        decision = next((each for each in self.decisions if each.name in names), None)
        if decision is None or not chosen:
            self.message_user(request, _("Select locks, and what to do."), messages.WARNING)
            return there
        try:
            rows = shown_locks(chosen)
        except CelerySafeError as error:
            self.message_user(request, str(error), messages.ERROR)
            return there
        return self.decide(request, decision, rows) or there

    def _show(self, request: HttpRequest, extra_context: Any) -> HttpResponse:
        text = request.GET.get("p", "1")
        page = max(1, int(text)) if text.isdecimal() and len(text) <= LONGEST_PAGE else 1
        begin = PAGE * (page - 1)
        prefix, task = (request.GET.get(name, "").strip() for name in ("q", "task"))
        markers = "all" in request.GET
        rows: list[Any] = []
        error: CelerySafeError | None = None
        try:
            # Read one lock more, to know whether there are more.
            found = iter_rows(prefix or None, task or None, markers=markers)
            rows = list(map(as_model, islice(found, begin, begin + PAGE + 1)))
        except CelerySafeError as failure:
            error = failure
            if isinstance(failure, ConfigurationError) and prefix:
                rows, error = self._find_whole(prefix)
        context = {
            "title": _("Locks that are held now"),
            "rows": rows[:PAGE],
            "error": error,
            "has_fences": any(row.lock.fence is not None for row in rows),
            "where": self._where(),
            "prefix": prefix,
            "task": task,
            "markers": markers,
            "page": page,
            "before": page - 1,
            "after": page + 1 if len(rows) > PAGE else 0,
            "decisions": self.get_decisions(request),
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return self._render(request, "change_list", context, extra_context)

    def _render(self, request: HttpRequest, page: str, context: Any, extra: Any) -> HttpResponse:
        status = NOT_AVAILABLE if isinstance(context["error"], LockBackendError) else None
        return self.render_page(request, f"lock/{page}.html", context | (extra or {}), status)

    def _find_whole(self, name: str) -> tuple[list[Any], CelerySafeError | None]:
        """Return the lock of this name in a list, and the error if the store does not answer."""
        try:
            lock = find_row(name)
        except CelerySafeError as failure:
            return [], failure
        return ([as_model(lock)] if lock is not None else []), None

    def _where(self) -> str:
        try:
            store = locate().store()
        except CelerySafeError:
            return ""  # the list reports the error
        if store.shared:
            return store.where
        return _("{store}, of this process alone").format(store=store.where)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show one lock, with the decisions that the user may take."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        name = unquote(object_id)
        rows, error = self._find_whole(name)
        row = rows[0] if rows else None
        context = {
            "title": printable(name),
            "original": name,
            "object_id": object_id,
            "texts": None if row is None else row.lock.texts(),
            "error": error,
            "decisions": [] if row is None else self.get_decisions(request),
            "selected": "" if row is None else self.selection_of(row),
        }
        return self._render(request, "change_form", context, extra_context)


def as_model(lock: LockRow) -> Any:
    """Return a lock as an object for the admin's forms and log entries."""
    # A name that is not printable can't be shown, and can't be in a log entry.
    row: Any = Lock(name=printable(lock.name))
    row.lock = lock
    row.has_page = row.name == lock.name
    # The token makes the decision release the lock that was shown, not a later one.
    row.selection = f"{lock.token}{json.dumps(lock.name)}"
    row.texts = {name: lock.text(name) for name in COLUMNS}
    return row


def shown_locks(selections: Iterable[str]) -> list[Any]:
    """
    Return the locks that a form names, if the same acquisition still holds them.

    Raises:
        LockBackendError: The store did not answer.
    """
    rows = []
    for selection in dict.fromkeys(selections):
        token, name = selection[:TOKEN_LENGTH], read_name(selection[TOKEN_LENGTH:])
        lock = find_row(name) if name else None
        if lock is not None and lock.token == token:
            rows.append(as_model(lock))
    return rows


def read_name(text: str) -> str:
    """Return a lock's name from its text in a form; "": the text is not valid."""
    try:
        name = json.loads(text)
    except GARBLED:
        return ""
    return name if isinstance(name, str) else ""
