"""The base of all pages: read-only, but for actions that have a permission and a log entry."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import datetime
from functools import wraps
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin, ShowFacets
from django.contrib.admin.utils import label_for_field, lookup_field
from django.core.paginator import Paginator
from django.db import router, transaction
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.functional import cached_property
from django.utils.html import format_html, strip_tags
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..databases import read_moment
from ..exceptions import CelerySafeError, LockBackendError
from ..texts import duration, printable

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise as Text

#: Most rows that an action takes at once: the confirmation page lists all of them.
MOST_ROWS: Final = 500
#: Most rows that a list counts and leads to: counting a whole table would take long.
MOST_COUNTED: Final = 10_000
#: Number of refused rows whose reason is shown, and characters of a text in a column.
MOST_REASONS: Final = 10
LONGEST_TEXT: Final = 200
#: The filters that a URL may have: others could reveal a value that is not shown.
LOOKUPS: Final = ("state__exact", "status__exact", "run__exact")
#: The levels of states, for ``badge``; all others are quiet.
LEVELS: Final = {"done": "good", "succeeded": "good", "failed": "bad", "dead": "bad"}
#: The headings of attributes that are no columns of a table.
HEADINGS: Final = {
    "age": gettext_lazy("held for"),
    "age_s": gettext_lazy("age"),
    "arguments": gettext_lazy("arguments"),
    "deaths": gettext_lazy("deaths"),
    "duration_s": gettext_lazy("duration"),
    "liveness": gettext_lazy("holder"),
    "name": gettext_lazy("key"),
    "process": gettext_lazy("process"),
    "progress": gettext_lazy("progress"),
    "reason": gettext_lazy("reason"),
    "remaining": gettext_lazy("lease left"),
    "resent": gettext_lazy("resent"),
    "shown_arguments": gettext_lazy("arguments"),
    "shown_params": gettext_lazy("params"),
    "starts": gettext_lazy("starts"),
    "task": gettext_lazy("task"),
    "task_id": gettext_lazy("task id"),
    "waits_s": gettext_lazy("waits for"),
}


def columns(model: type[Model], names: str, longest: int | None = LONGEST_TEXT) -> tuple[Any, ...]:
    """Return attributes of rows, such as ``age_s claim.holder.process``, as columns or fields."""
    return tuple(_column(model, name, longest) for name in names.split())


def _column(model: Any, name: str, longest: int | None) -> Any:
    last = name.rpartition(".")[2]
    heading = HEADINGS.get(last)

    @admin.display(
        description=heading or model._meta.get_field(name).verbose_name,
        ordering=None if heading else name,
    )
    def show(row: Any) -> str:
        value = attrgetter(name)(row)
        if label := getattr(row, f"get_{last}_display", None):
            if getattr(row, "is_orphaned", False):
                return badge("look", _("its process is gone"))
            return badge(LEVELS.get(value, "quiet"), label())
        if isinstance(value, datetime):
            return f"{localtime(read_moment(row._state.db, value)):%Y-%m-%d %H:%M:%S %Z}"
        if isinstance(value, float):
            return duration(value)
        text = "-" if value in (None, "") else printable(str(value))
        return Truncator(text).chars(longest) if longest else text

    show.__name__ = last  # the CSS class of its cells
    return show


def badge(level: str, text: Text) -> SafeString:
    """Return a state as a coloured word; ``level`` is ``good``, ``look``, ``bad`` or ``quiet``."""
    return format_html('<span class="safe-state safe-{}">{}</span>', level, text)


def permission(name: str) -> Callable[[ReadOnlyAdmin, HttpRequest], bool]:
    """Return the method ``has_…_permission`` that ``@admin.action(permissions=…)`` needs."""

    def has_permission(page: ReadOnlyAdmin, request: HttpRequest) -> bool:
        codename = f"{page.opts.app_label}.{name}_{page.opts.model_name}"
        return bool(request.user.has_perm(codename))

    return has_permission


def row_action(
    label: Text, done: Text, *, refused: Text = "", ask: Text = ""
) -> Callable[[Any], Any]:
    """
    Make an admin action, with a permission of its own, of a method that acts on one row.

    The method returns a false value, or raises one of our errors, if it can't.

    Args:
        label: The verb on the button.
        done: What was done, for the log and the user.
        refused: Why it returned a false value.
        ask: The consequences: there is a confirmation page first.
    """

    def decorate(act: Callable[[Any, Any], object]) -> Any:
        @admin.action(permissions=[act.__name__], description=label)
        @wraps(act)
        def run(page: ReadOnlyAdmin, request: HttpRequest, queryset: Any) -> HttpResponse | None:
            rows = list(queryset[:MOST_ROWS])
            if ask and rows and "confirmed" not in request.POST:
                return page.confirm(request, act.__name__, ask, rows)
            versions = request.POST.get("versions", "").split()
            faults: list[str] = []
            count = 0
            for row in rows:
                about = f"{done}: {page.describe(row)}"
                database = row._state.db  # None: a lock, which is in no transaction
                try:
                    with transaction.atomic(using=database) if database else nullcontext():
                        if (versions and _version_of(row) not in versions) or not act(page, row):
                            raise CelerySafeError(str(refused))
                        page.log_change(request, row, about)
                    count += 1
                except CelerySafeError as error:
                    faults.append(f"{page.opts.verbose_name} {row}: {error}")
                    if isinstance(error, LockBackendError):
                        break  # it would not answer for the other rows either
            name = page.opts.verbose_name if count == 1 else page.opts.verbose_name_plural
            text = _("{done}: {count} {name}.").format(done=done, count=count, name=name)
            page.message_user(request, text, messages.SUCCESS if count else messages.WARNING)
            for fault in faults[:MOST_REASONS]:
                page.message_user(request, fault, messages.ERROR)
            return None

        return run

    return decorate


def _version_of(row: Any) -> str:
    """Return a word for a row and its claim: a later row with its key has another."""
    return str(getattr(row, "token", "") or row.pk)


class BoundedPaginator(Paginator):  # type: ignore[type-arg] # not generic at run time
    """Counts a table up to a limit; filters and searches find the rows beyond it."""

    @cached_property
    def count(self) -> int:
        rows: Any = self.object_list
        return int(rows.order_by()[:MOST_COUNTED].count())


class ReadOnlyAdmin(ModelAdmin):  # type: ignore[type-arg] # not generic at run time
    """Shows rows and the actions on them; all else is read-only."""

    change_form_template = "admin/django_celery_safe/change_form.html"
    paginator: ClassVar[Any] = BoundedPaginator
    list_per_page = 100
    list_max_show_all = 0
    show_full_result_count = False
    show_facets = ShowFacets.NEVER

    class Media:
        css = {"all": ["django_celery_safe/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> Any:
        """Return the rows of the database for writes, because a replica may be behind."""
        rows: Any = self.model._default_manager.using(router.db_for_write(self.model))
        return rows.listed()

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        return lookup in LOOKUPS

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **options: Any
    ) -> HttpResponse:
        """Show a row with a button for each action that the user may take."""
        context["buttons"] = self.get_action_choices(request, [])
        return super().render_change_form(request, context, *args, **options)

    def describe(self, row: Any) -> str:
        """Return what the list shows of a row, for the question and the log."""
        parts = []
        for name in self.list_display[1:]:
            text = strip_tags(lookup_field(name, row, self)[2]).rstrip(".")
            if text != "-":
                parts.append(f"{label_for_field(name, self.model, self)}: {text}")
        return "; ".join(parts)

    def confirm(self, request: HttpRequest, name: str, ask: Text, rows: list[Any]) -> HttpResponse:
        """Return the page that asks whether to do it, and lists the rows."""
        label = getattr(self, name).short_description
        context = {
            "label": label,
            "action": name,
            "consequences": ask,
            "rows": [(row.pk, str(row), self.describe(row)) for row in rows],
            # One field, because Django refuses a form with many.
            "versions": " ".join(map(_version_of, rows)),
        }
        title = _("{action}: are you sure?").format(action=label)
        return self.page(request, "confirm", title, context)

    def page(
        self, request: HttpRequest, name: str, title: str, context: Any, status: int | None = None
    ) -> HttpResponse:
        """Return a page of ours, by the name of its template."""
        ours = {"opts": self.opts, "media": self.media, "title": title, **context}
        context = {**self.admin_site.each_context(request), **ours}
        template = f"admin/django_celery_safe/{name}.html"
        return TemplateResponse(request, template, context, status=status)
