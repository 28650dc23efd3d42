"""Locks in the admin, read from their store as they are held."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse

from ..exceptions import BackendNotSupported, CelerySafeError, LockBackendError
from ..locks import HeldLock, find_lock, iter_locks, release_lock
from ..locks.stores import locate
from ..locks.stores.base import GARBLED, TOKEN_LENGTH, is_overdue
from ..management.console import duration
from ..models import Lock
from ..texts import printable
from .pages import Decision, ReadOnlyAdmin, Refused

#: Locks on one page.
PAGE: Final = 100
#: Digits of the number of a page.
LONGEST_PAGE: Final = 9
#: How a renewal is told of.
RENEWED: Final = {"yes": "renewed", "no": "not renewed", "overdue": "whose renewal is overdue"}
#: HTTP status of a page that could not ask the store.
NOT_AVAILABLE: Final = 503


def release(row: Any) -> None:
    """Free a lock whose lease nobody renews."""
    if row.held.holder.renewed:
        lives = "its process lives, or died so short ago that the lease still runs"
        if row.renewed == "overdue":
            lives = "that is overdue, so its process may be dead"
        raise Refused(
            f"The lock {row} is being renewed: {lives}. If it is dead, the lock is free by itself "
            f"in {row.left}. Freed now, a second may run beside the first: for that, choose it "
            f"again, and tick the box on the page that asks."
        )
    release_renewed(row)


def release_renewed(row: Any) -> None:
    """Free a lock, whoever holds it."""
    if not release_lock(row.held):
        raise Refused(f"The lock {row} was freed meanwhile, or someone else has it now.")


RELEASE = Decision(
    name="release",
    label="Release",
    consequence="Whoever holds one of these is not stopped: it finds out at its next renewal. "
    "Until then a second may run beside it.",
    done="was released",
    act=release,
    force="Also where the lease is being renewed, so that the holder most likely lives.",
    forced=release_renewed,
)


@admin.register(Lock)
class LockAdmin(ReadOnlyAdmin):
    """Who holds what, since when, and whether it is renewed."""

    decisions = (RELEASE,)
    command = "manage.py celery_locks"

    def get_urls(self) -> list[Any]:
        urls: list[Any] = super().get_urls()
        # Locks that live in a database can't be asked inside a transaction, nor a request's.
        for url in urls:
            for alias in connections:
                transaction.non_atomic_requests(alias)(url.callback)
        return urls

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: Any = None
    ) -> Lock | None:
        """Return a lock of this name, held or not: its history is there in any case."""
        # Log entries have printable names only, and not every database can look for others.
        return Lock(name=object_id) if object_id.isprintable() else None

    def describe(self, row: Any) -> str:
        return describe(row)

    def selection_of(self, row: Any) -> str:
        return str(row.selection)

    def together(self, row: Any) -> AbstractContextManager[Any]:
        # In no transaction: locks may live in a database, and are freed there at once.
        return nullcontext()

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        """Show a page of the locks, or take a decision about some of them."""
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
            self.message_user(request, "Select locks, and what to do.", messages.WARNING)
            return there
        try:
            rows = find_shown(chosen)
        except CelerySafeError as error:
            self.message_user(request, str(error), messages.ERROR)
            return there
        return self.decide(request, decision, rows) or there

    def _show(self, request: HttpRequest, extra_context: Any) -> HttpResponse:
        text = request.GET.get("p", "1")
        page = max(1, int(text)) if text.isdecimal() and len(text) <= LONGEST_PAGE else 1
        begin = PAGE * (page - 1)
        prefix, task = (request.GET.get(name, "").strip() for name in ("q", "task"))
        rows: list[Any] = []
        error: CelerySafeError | None = None
        try:
            # One more, to know whether there is more.
            found = iter_locks(prefix or None, task or None)
            rows = list(map(as_row, islice(found, begin, begin + PAGE + 1)))
        except CelerySafeError as failure:
            error = failure
            if isinstance(failure, BackendNotSupported) and prefix:
                rows, error = self._find_whole(prefix)
        context = {
            **self.admin_site.each_context(request),
            "title": "Locks that are held now",
            "opts": self.opts,
            "media": self.media,
            "rows": rows[:PAGE],
            "has_fences": any(row.held.fence is not None for row in rows),
            "error": error,
            "where": self._where(),
            "prefix": prefix,
            "task": task,
            "page": page,
            "before": self._url(request, page - 1) if page > 1 else "",
            "after": self._url(request, page + 1) if len(rows) > PAGE else "",
            "decisions": self.find_decisions(request),
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
            **(extra_context or {}),
        }
        status = NOT_AVAILABLE if isinstance(error, LockBackendError) else None
        template = "admin/django_celery_safe/lock/change_list.html"
        return TemplateResponse(request, template, context, status=status)

    def _find_whole(self, name: str) -> tuple[list[Any], CelerySafeError | None]:
        """Return the one lock of this name, where a store can't list them."""
        try:
            held = find_lock(name)
        except CelerySafeError as failure:
            return [], failure
        return ([as_row(held)] if held is not None else []), None

    def _where(self) -> str:
        try:
            store = locate().store()
        except CelerySafeError:
            return ""  # the list says why
        return store.where if store.shared else f"{store.where}, of this process alone"

    def _url(self, request: HttpRequest, page: int) -> str:
        given = request.GET.copy()
        given["p"] = str(page)
        return f"?{given.urlencode()}"

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: Any = None
    ) -> HttpResponse:
        """Show one lock, and what was done about it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        name = unquote(object_id)
        error: CelerySafeError | None = None
        held = None
        try:
            held = find_lock(name)
        except CelerySafeError as failure:
            error = failure
        row = None if held is None else as_row(held)
        context = {
            **self.admin_site.each_context(request),
            "title": printable(name),
            "opts": self.opts,
            "media": self.media,
            "original": name,
            "object_id": object_id,
            "row": row,
            "error": error,
            "decisions": [] if row is None else self.find_decisions(request),
            "selected": "" if row is None else self.selection_of(row),
            **(extra_context or {}),
        }
        status = NOT_AVAILABLE if isinstance(error, LockBackendError) else None
        template = "admin/django_celery_safe/lock/change_form.html"
        return TemplateResponse(request, template, context, status=status)


def as_row(held: HeldLock) -> Any:
    """Return a lock as a row with what the pages show of it."""
    # What is not printable can neither be shown nor stand in a log entry.
    row: Any = Lock(name=printable(held.name))
    row.held = held
    row.holder = held.holder
    row.has_page = row.name == held.name
    # With the token: what is freed is what was shown, and not who came after.
    row.selection = f"{held.token}{json.dumps(held.name)}"
    row.age = None
    if held.holder.since:
        row.since = datetime.fromtimestamp(held.holder.since, UTC if settings.USE_TZ else None)
        row.age = duration(max(0.0, time.time() - held.holder.since))
    row.renewed = "overdue" if is_overdue(held) else "yes" if held.holder.renewed else "no"
    row.fence = "-" if held.fence is None else str(held.fence)
    row.left = duration(held.remaining)
    row.process = f"pid {held.holder.pid} on {printable(held.holder.host)}"
    if not held.holder.host:
        row.process = "a message under way" if held.holder.task_id else "not known"
    row.task, row.task_id, row.arguments = (
        printable(text or "")
        for text in (held.holder.task, held.holder.task_id, held.holder.arguments)
    )
    return row


def describe(row: Any) -> str:
    """Return who holds a lock, for how long, as a sentence."""
    told = [f"held by {row.process}"]
    if row.age is not None:
        told.append(f"for {row.age}")
    if row.task:
        told.append(f"task {row.task} {row.arguments}".strip())
    if row.task_id:
        told.append(f"task ID {row.task_id}")
    told.append(f"lease {row.left} left, {RENEWED[row.renewed]}")
    return "; ".join(told)


def find_shown(selections: Iterable[str]) -> list[Any]:
    """
    Return of the locks that a form names those that are still held by who held them.

    Raises:
        LockBackendError: The store did not answer.
    """
    rows = []
    for selection in dict.fromkeys(selections):
        token, name = selection[:TOKEN_LENGTH], read_name(selection[TOKEN_LENGTH:])
        held = find_lock(name) if name else None
        if held is not None and held.token == token:
            rows.append(as_row(held))
    return rows


def read_name(text: str) -> str:
    """Return the name of a lock as a form has it; "": it is none."""
    try:
        name = json.loads(text)
    except GARBLED:
        return ""
    return name if isinstance(name, str) else ""
