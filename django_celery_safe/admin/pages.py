"""The base of all pages: read-only lists, and actions with a confirmation (:class:`Decision`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final

from django.contrib import admin, messages
from django.contrib.admin import ModelAdmin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.db.models import Model, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import lazy
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst
from django.utils.translation import gettext as _

from ..compat import is_of_form, make_list_action
from ..databases import Now
from ..exceptions import CelerySafeError, LockBackendError
from ..inspection.decision import Decision, NeedsForce, Refused
from ..inspection.row import Row
from ..texts import printable

if TYPE_CHECKING:
    from django_stubs_ext import StrOrPromise

#: Most rows that one decision may be about: the confirmation page lists all of them.
MOST_ROWS: Final = 500
#: Number of refused rows whose reason is shown.
MOST_REASONS: Final = 10
#: The levels of states, for ``badge``; all others are quiet.
LEVELS: Final = {"done": "good", "succeeded": "good", "failed": "bad", "dead": "bad"}
#: The lookups that Django's filters use in URLs.
LOOKUPS: Final = ("", "exact", "isnull")


def columns(kind: Any, *names: str, **orderings: str) -> tuple[Any, ...]:
    """
    Return attributes of a row for ``list_display`` and ``fields``.

    Args:
        orderings: The model's columns by which the list can be ordered, by attribute.
    """
    return tuple(_column(kind, name, orderings.get(name)) for name in names)


def _column(kind: Any, name: str, ordering: str | None) -> Any:
    @admin.display(description=lazy(kind.heading, str)(name), ordering=ordering)
    def show(row: Any) -> str:
        text: str = kind(row).text(name)
        return text

    show.__name__ = name  # the CSS class of its cells
    return show


def badge(level: str, text: str) -> SafeString:
    """Return a state as a coloured word; ``level`` is ``good``, ``look``, ``bad`` or ``quiet``."""
    return format_html('<span class="safe-state safe-{}">{}</span>', level, text)


class ReadOnlyAdmin(ModelAdmin):  # type: ignore[type-arg] # not generic at run time
    """Shows rows and the decisions about them; all else is read-only."""

    #: The description of a row: a subclass of Row.
    kind: ClassVar[Any]
    decisions: ClassVar[Sequence[Decision]] = ()
    #: The columns by which a URL may filter the list.
    narrowed_by: ClassVar[Sequence[str]] = ()
    #: The command that does the same in a terminal.
    command: ClassVar[str]
    #: The text above the list, and the text in place of an empty list; "": no text.
    help_text: ClassVar[StrOrPromise] = ""
    empty_text: ClassVar[StrOrPromise] = ""
    change_form_template = "admin/django_celery_safe/change_form.html"
    list_per_page = 100
    list_max_show_all = 0
    # Each of these counts would be a query over the whole table.
    show_full_result_count = False
    actions_on_bottom = False

    class Media:
        css = {"all": ["django_celery_safe/admin.css"]}

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the rows of the database for writes, because a replica may be behind."""
        alias = router.db_for_write(self.model)
        rows: QuerySet[Any] = self.model._default_manager.using(alias)
        rows = rows.annotate(asked_at=Now())
        return rows.order_by(*self.get_ordering(request))

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Return whether a URL may filter by this; a filter must not reveal a hidden value."""
        column, _, how = lookup.partition("__")
        return column in self.narrowed_by and how in LOOKUPS

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return a row; None: it does not exist."""
        # Keys are printable, and not every database can search for other characters.
        return (
            super().get_object(request, object_id, from_field) if object_id.isprintable() else None
        )

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> dict[str, Any]:
        if is_of_form(action_location):
            return {}  # a row's page has its own buttons
        ours = {
            each.name: make_list_action(
                partial(_decide, decision=each),
                each.name,
                _("%(decision)s selected %(name)s")
                % {"decision": each.label, "name": self.opts.verbose_name_plural},
            )
            for each in self.get_decisions(request)
        }
        return {**super().get_actions(request), **ours}

    def get_decisions(self, request: HttpRequest) -> list[Decision]:
        """Return the decisions that this user may take."""
        return [each for each in self.decisions if self._may_take(each, request)]

    def _may_take(self, decision: Decision, request: HttpRequest) -> bool:
        codename = f"{decision.name}_{self.opts.model_name}"
        return bool(request.user.has_perm(f"{self.opts.app_label}.{codename}"))

    def changelist_view(self, request: HttpRequest, extra_context: Any = None) -> HttpResponse:
        if self.has_view_permission(request):
            self._check_posted(request)
        return super().changelist_view(request, extra_context)

    def _check_posted(self, request: HttpRequest) -> None:
        """Raise PermissionDenied for a posted decision that the user may not take."""
        posted = request.POST.getlist("action")
        for decision in self.decisions:
            if decision.name in posted and not self._may_take(decision, request):
                raise PermissionDenied

    def render_change_form(
        self,
        request: HttpRequest,
        context: dict[str, Any],
        add: bool = False,
        change: bool = False,
        form_url: str = "",
        obj: Any = None,
    ) -> HttpResponse:
        """Show a row with a button for each decision that fits it."""
        fitting = [each for each in self.get_decisions(request) if each.fits(self.get_row(obj))]
        context.update(decisions=fitting, selected=self.selection_of(obj))
        context.update(self.describe_page(obj))
        return super().render_change_form(request, context, add, change, form_url, obj)

    def describe_page(self, row: Any) -> dict[str, Any]:
        """Return the template context that a row's own page shows besides its fields."""
        return {}

    def get_url(self, page: str, *args: Any) -> str:
        """Return the URL of another of our pages, such as ``stagerun_change``."""
        name = f"admin:{self.opts.app_label}_{page}"
        return reverse(name, args=args, current_app=self.admin_site.name)

    def get_row(self, row: Any) -> Row:
        """Return the description of a model's row."""
        described: Row = self.kind(row)
        return described

    def describe(self, row: Any) -> str:
        """Return the description of a row on the confirmation page."""
        return printable(self.get_row(row).describe())

    def together(self, row: Any) -> AbstractContextManager[Any]:
        """Return a context in which a decision and its log entry both happen, or neither does."""
        together: AbstractContextManager[Any] = transaction.atomic(using=row._state.db)
        return together

    def selection_of(self, row: Any) -> str:
        """Return the value that identifies a row in a form."""
        return str(row.pk)

    def version_of(self, row: Any) -> str:
        """Return a row's version, a word; a later row with its key has another; "": no versions."""
        return ""

    def decide(
        self, request: HttpRequest, decision: Decision, rows: Sequence[Any]
    ) -> HttpResponse | None:
        """Show the confirmation page; if it was confirmed, apply the decision and return None."""
        if not self._may_take(decision, request):
            raise PermissionDenied
        if len(rows) > MOST_ROWS:
            self.message_user(
                request,
                _(
                    "More than {most} {name} are selected, which is the most here: you are to see "
                    "what you decide about. Narrow the list, or use {command}, which takes any "
                    "number."
                ).format(most=MOST_ROWS, name=self.opts.verbose_name_plural, command=self.command),
                messages.ERROR,
            )
            return None
        if "confirmed" not in request.POST:
            return self._ask(request, decision, rows)
        if shown := set(request.POST.get("versions", "").split()):
            rows = [row for row in rows if self.version_of(row) in shown]
        force = "forced" in request.POST and bool(decision.force)
        faults = self._find_missing(request, rows)
        done = 0
        for row in rows:
            try:
                self._take(request, decision, row, force=force)
            except Refused as refusal:
                text = _("The {name} {row} stays: {reason}.")
                if isinstance(refusal, NeedsForce):
                    text = _(
                        "The {name} {row} stays: {reason}; or choose it again, and tick the box."
                    )
                reason = printable(str(refusal))
                faults.append(text.format(name=self.opts.verbose_name, row=row, reason=reason))
            except LockBackendError as error:
                faults.append(str(error))
                break  # it would not answer for the other rows either
            except CelerySafeError as error:
                faults.append(str(error))
            else:
                done += 1
        self._report(request, decision, done, len(rows), faults)
        return None

    def _find_missing(self, request: HttpRequest, rows: Sequence[Any]) -> list[str]:
        """Return the message about rows that were shown but no longer exist."""
        posted = len(set(request.POST.getlist(ACTION_CHECKBOX_NAME)))
        if posted <= len(rows):
            return []
        text = _("{count} of {total} rows ended or changed after they were shown.")
        return [text.format(count=posted - len(rows), total=posted)]

    def _take(self, request: HttpRequest, decision: Decision, row: Any, *, force: bool) -> None:
        user: Any = request.user  # the project's own user model
        about = _("{done}: {row}.").format(done=capfirst(decision.done), row=self.describe(row))
        with self.together(row):
            decision.take(self.get_row(row), force=force)
            LogEntry.objects.log_actions(
                user.pk,
                [row],
                DELETION if decision.deletes else CHANGE,
                change_message=about,
                single_object=True,
            )

    def _report(
        self, request: HttpRequest, decision: Decision, done: int, total: int, faults: list[str]
    ) -> None:
        name = self.opts.verbose_name if done == 1 else self.opts.verbose_name_plural
        if done:
            # Only the English text has a plural form here.
            verb = str(decision.done)
            verb = verb if done == 1 else verb.replace("was ", "were ", 1)
            text = _("{count} {name} {verb}.").format(count=done, name=name, verb=verb)
            self.message_user(request, text, messages.SUCCESS)
        for fault in faults[:MOST_REASONS]:
            self.message_user(request, fault, messages.ERROR)
        if len(faults) > MOST_REASONS:
            left = _("{count} of {total} stayed as they were.")
            self.message_user(request, left.format(count=total - done, total=total), messages.ERROR)

    def _ask(self, request: HttpRequest, decision: Decision, rows: Sequence[Any]) -> HttpResponse:
        plural = self.opts.verbose_name_plural
        shown = [(self.selection_of(row), str(row), self.describe(row)) for row in rows]
        context = {
            "title": _("{decision}: are you sure?").format(decision=decision.label),
            "decision": decision,
            "rows": shown,
            # One field, because Django refuses a form with many.
            "versions": " ".join(filter(None, map(self.version_of, rows))),
            "name": self.opts.verbose_name if len(shown) == 1 else plural,
            "action_checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return self.render_page(request, "confirm.html", context)

    def render_page(
        self, request: HttpRequest, page: str, context: dict[str, Any], status: int | None = None
    ) -> HttpResponse:
        """Return a page that Django's admin does not have, from a template of ours."""
        site = {**self.admin_site.each_context(request), "opts": self.opts, "media": self.media}
        template = f"admin/django_celery_safe/{page}"
        return TemplateResponse(request, template, {**site, **context}, status=status)


def _decide(
    page: ReadOnlyAdmin, request: HttpRequest, queryset: QuerySet[Model], *, decision: Decision
) -> HttpResponse | None:
    """Apply a decision as one of Django's admin actions."""
    # Read one row more than allowed, to know whether there are too many.
    return page.decide(request, decision, list(queryset[: MOST_ROWS + 1]))
