"""Permissions: the whole table, on every page and with every way to send a form."""

from typing import Any, Final

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission
from django.urls import reverse

from django_celery_safe.admin.pages import ReadOnlyAdmin
from django_celery_safe.models import IdempotencyRecord, Lock, OutboxMessage, StageRun, StageStep
from tests.admin import rows
from tests.admin.cases import CASES, Case, make_row
from tests.admin.conftest import every_page, make_visitor
from tests.admin.pages import Visitor

pytestmark = pytest.mark.usefixtures("site")


every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.decision)

LOGIN, FORBIDDEN, SHOWN, DONE = "login", 403, 200, 302
#: Users: their permissions, of "view" and "act", other attributes, and the answers that they get:
#: to a page, to a form that asks, and to one that is confirmed.
VISITORS: Final[dict[str, tuple[set[str], dict[str, Any], tuple[object, object, object]]]] = {
    "nobody": ({"view", "act"}, {"is_staff": False}, (LOGIN, LOGIN, LOGIN)),
    "inactive staff": ({"view", "act"}, {"is_active": False}, (LOGIN, LOGIN, LOGIN)),
    "staff": (set(), {}, (FORBIDDEN, FORBIDDEN, FORBIDDEN)),
    "staff who may see": ({"view"}, {}, (SHOWN, FORBIDDEN, FORBIDDEN)),
    "staff who may act": ({"act"}, {}, (FORBIDDEN, FORBIDDEN, FORBIDDEN)),
    "staff who may both": ({"view", "act"}, {}, (SHOWN, SHOWN, DONE)),
    "superuser": (set(), {"is_superuser": True}, (SHOWN, SHOWN, DONE)),
}
#: Ways to send a form (for all rows, from the list, from a row's page), by its other fields.
WAYS: Final[list[dict[str, str]]] = [
    {"index": "0", "select_across": "1"},
    {"index": "0", "select_across": "0"},
    {},
]


def come(who: str, case: Case, *, csrf: bool = False) -> Visitor:
    """Log one of the visitors in."""
    kinds, attributes, _ = VISITORS[who]
    names = {"view": f"view_{case.model._meta.model_name}", "act": case.permission}
    return make_visitor(*(names[kind] for kind in kinds), csrf=csrf, **attributes)


def outcome_of(page: Any) -> object:
    """Return the status, or that somebody has to log in."""
    return LOGIN if page.response.get("Location", "").startswith("/admin/login/") else page.status


@every_case
def test_who_may_do_what(case: Case) -> None:
    """
    Pages and forms answer each user as the table says.

    A form changes a row only if the user may, and only after the question; then it is logged.
    """
    pk, selection = case.make()
    for who, (_, _, (sees, asks, confirms)) in VISITORS.items():
        visitor = come(who, case)
        pages = every_page(case.model, pk)
        shown = {name: visitor.get(url) for name, url in pages.items()}
        assert {(who, outcome_of(page)) for page in shown.values()} == {(who, sees)}
        if sees == SHOWN:
            offered = [case.decision in shown[name].decisions for name in ("list", "change")]
            assert (who, offered) == (who, [asks == SHOWN] * 2)
        before = case.state(pk)
        for way in WAYS:
            asked = visitor.take(pages["list"], case.decision, selection, **way)
            assert (who, outcome_of(asked)) == (who, asks)
            if confirms != DONE:
                told = visitor.take(pages["list"], case.decision, selection, confirmed="1", **way)
                assert (who, outcome_of(told)) == (who, confirms)
        assert (who, case.state(pk), LogEntry.objects.count()) == (who, before, 0)
        if confirms == DONE:
            # The fields of the page that asks are enough to confirm the decision.
            assert (asked.decisions, asked.selections) == ([case.decision], [selection])
            told = visitor.take(pages["list"], *asked.decisions, *asked.selections, confirmed="1")
            assert (who, outcome_of(told)) == (who, DONE)
            assert case.state(pk) != before
            entry = LogEntry.objects.get()
            assert (entry.object_id, entry.user_id) == (str(pk), visitor.user.pk)
            entry.delete()
            pk, selection = case.make()


#: A decision about a lock, which has pages of its own, and one about a row.
two_cases = pytest.mark.parametrize("case", CASES[:2], ids=lambda case: case.decision)


@two_cases
def test_tokens(case: Case) -> None:
    """A form that another site sends changes nothing; the forms of our pages have the token."""
    pk, selection = case.make()
    visitor, before = come("superuser", case, csrf=True), case.state(pk)
    pages = every_page(case.model, pk)
    for confirmed in ({}, {"confirmed": "1"}):
        page = visitor.take(pages["list"], case.decision, selection, **confirmed)
        assert (page.status, case.state(pk)) == (FORBIDDEN, before)
    shown = [visitor.get(pages["list"]), visitor.get(pages["change"])]
    (token, *_) = shown[0].root.find("input", name="csrfmiddlewaretoken")
    form = {"csrfmiddlewaretoken": token.attributes["value"]}
    shown.append(visitor.take(pages["list"], case.decision, selection, **form))
    for page in shown:
        forms = page.root.find("form", method="post")
        assert len(forms) >= 2  # that of the button to log out, and ours
        assert all(each.find("input", name="csrfmiddlewaretoken") for each in forms)


@two_cases
def test_other_ways_to_send_it(case: Case) -> None:
    """Parameters in the URL, and forms that are sent to another page, change nothing."""
    pk, selection = case.make()
    before, visitor = case.state(pk), come("superuser", case)
    query = {"action": case.decision, "_selected_action": selection, "confirmed": "1"}
    for name, url in every_page(case.model, pk).items():
        for method in ("get", "head", "put", "patch", "delete", "options"):
            getattr(visitor.client, method)(url, query_params=query)
        if name != "list":
            visitor.post(url, **query, state="done", status="succeeded", due_at="", _save="1")
    assert (case.state(pk), LogEntry.objects.count()) == (before, 0)


def test_a_permission_for_one_decision_is_none_for_another() -> None:
    """A user who may only retry messages may not discard them, however the form is written."""
    row = rows.leave_dead()
    visitor = make_visitor("view_outboxmessage", "retry_outboxmessage")
    url = every_page(OutboxMessage, row.pk)["list"]
    assert set(visitor.get(url).decisions) == {"retry"}
    for actions in (["discard"], ["retry", "discard"], ["discard", "retry"], ["none", "discard"]):
        for index in ("0", "1"):
            form = {"index": index, "_selected_action": str(row.pk), "confirmed": "1"}
            assert visitor.post(url, action=actions, **form).status == FORBIDDEN
    assert OutboxMessage.objects.get() == row


def test_nothing_is_added_changed_or_deleted() -> None:
    """Not even a superuser adds, edits or deletes a row by Django's own pages and action."""
    makers = {case.model: case.make for case in CASES}
    makers[StageStep] = lambda: make_row(rows.work_on(rows.begin(1)))
    visitor = make_visitor(is_superuser=True)
    for model, make in makers.items():
        pk, selection = make()
        pages = every_page(model, pk)
        add = reverse(f"admin:django_celery_safe_{model._meta.model_name}_add")
        for url in (add, pages["change"].replace("/change/", "/delete/")):
            assert visitor.get(url).status == FORBIDDEN
            assert visitor.post(url, post="yes").status == FORBIDDEN
        shown = visitor.get(pages["list"])
        assert "delete_selected" not in shown.decisions
        visitor.take(pages["list"], "delete_selected", selection, post="yes")
        assert len(visitor.get(pages["list"]).rows) == len(shown.rows) > 0
        if model is not Lock:
            assert visitor.post(pages["change"], _save="1").status == FORBIDDEN


def test_every_decision_is_in_the_table() -> None:
    """The table above has every decision that the pages offer, under the permission of its own."""
    models = {Lock, OutboxMessage, IdempotencyRecord, StageRun, StageStep}
    pages = [admin.site.get_model_admin(model) for model in models]
    assert all(isinstance(page, ReadOnlyAdmin) for page in pages)
    offered = {(page.model, each.name) for page in pages for each in page.decisions}
    assert offered == {(case.model, case.decision) for case in CASES}
    ours = Permission.objects.filter(content_type__app_label="django_celery_safe")
    assert set(ours.values_list("codename", flat=True)) == {
        *(case.permission for case in CASES),
        *(f"view_{model._meta.model_name}" for model in models),
    }


def test_index() -> None:
    """The admin's start page shows whoever logs in what they may see, and nothing else."""
    ours = {"Locks", "Outbox messages", "Idempotency records", "Runs of stages", "Steps"}
    for permissions, seen in [
        (("release_lock", "discard_outboxmessage"), set[str]()),
        (("view_stagerun", "view_stagestep"), {"Runs of stages", "Steps"}),
    ]:
        visitor = make_visitor(*permissions)
        page = visitor.get(reverse("admin:index"))
        assert {each.text for each in page.root.find("th")} & ours == seen
        listed = visitor.get(reverse("admin:app_list", args=["django_celery_safe"]))
        assert (page.status, listed.status) == (SHOWN, SHOWN if seen else 404)
