"""Permissions: the whole table, on every page and with every way to send a form."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
from django.contrib.admin.models import LogEntry
from django.db.models import Model
from django.urls import reverse

from django_celery_safe import find_lock
from django_celery_safe.admin.pages import ReadOnlyAdmin
from django_celery_safe.models import IdempotencyRecord, Lock, OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import every_page, make_visitor
from tests.admin.pages import Visitor

pytestmark = pytest.mark.usefixtures("lite")


class Case(NamedTuple):
    """A decision, and a row that it fits."""

    decision: str
    model: type[Model]
    #: Makes the row; returns its primary key, and what stands for it in forms.
    make: Callable[[], tuple[Any, str]]
    #: Returns what is to change, and only by the decision.
    state: Callable[[Any], object]

    @property
    def permission(self) -> str:
        """The codename of the decision's own permission."""
        return f"{self.decision}_{self.model._meta.model_name}"


def make_lock() -> tuple[str, str]:
    """Have somebody hold a lock that is not renewed."""
    token = rows.hold("feed", rows.HOLDER._replace(renewed=False))
    return "feed", f'{token}"feed"'


def token_of(name: str) -> str | None:
    """Return which acquisition holds a lock."""
    held = find_lock(name)
    return None if held is None else held.token


def make_row(row: Model) -> tuple[Any, str]:
    """Return what stands for a row."""
    return row.pk, str(row.pk)


def state_of(model: Any, *columns: str) -> Callable[[Any], object]:
    """Return what reads these columns of a row."""
    return lambda pk: model.objects.filter(pk=pk).values_list(*columns).first()


CASES: Final = [
    Case("release", Lock, make_lock, token_of),
    Case("retry", OutboxMessage, lambda: make_row(rows.leave_dead()),
         state_of(OutboxMessage, "due_at", "dead_at", "attempts")),
    Case("discard", OutboxMessage, lambda: make_row(rows.leave_dead()),
         state_of(OutboxMessage, "pk")),
    Case("forget", IdempotencyRecord, lambda: make_row(rows.record("paid:7")),
         state_of(IdempotencyRecord, "state")),
    Case("resume", StageRun, lambda: make_row(rows.end(rows.begin(1), Status.FAILED)),
         state_of(StageRun, "status")),
    Case("abort", StageRun, lambda: make_row(rows.begin(1)), state_of(StageRun, "status")),
]  # fmt: skip
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.decision)
MODELS: Final = {Lock, OutboxMessage, IdempotencyRecord, StageRun, StageStep}

#: Users: their permissions, of "view" and "act", and other attributes.
VISITORS: Final[dict[str, tuple[set[str], dict[str, Any]]]] = {
    "nobody": (set(), {"is_staff": False}),
    "nobody with all permissions": ({"view", "act"}, {"is_staff": False}),
    "inactive staff": ({"view", "act"}, {"is_active": False}),
    "staff": (set(), {}),
    "staff who may see": ({"view"}, {}),
    "staff who may act": ({"act"}, {}),
    "staff who may both": ({"view", "act"}, {}),
    "superuser": (set(), {"is_superuser": True}),
}
#: Ways to send a form: its fields beside the decision and the rows.
WAYS: Final[dict[str, dict[str, str]]] = {
    "from the page of a row": {},
    "from the list": {"index": "0", "select_across": "0"},
    "of all rows": {"index": "0", "select_across": "1"},
}
LOGIN, FORBIDDEN, SHOWN, DONE = "login", 403, 200, 302

#: Each user's answers: to a page, to a form that asks, and to one that is confirmed.
OUTCOMES: Final[dict[str, tuple[object, object, object]]] = {
    "nobody": (LOGIN, LOGIN, LOGIN),
    "nobody with all permissions": (LOGIN, LOGIN, LOGIN),
    "inactive staff": (LOGIN, LOGIN, LOGIN),
    "staff": (FORBIDDEN, FORBIDDEN, FORBIDDEN),
    "staff who may see": (SHOWN, FORBIDDEN, FORBIDDEN),
    "staff who may act": (FORBIDDEN, FORBIDDEN, FORBIDDEN),
    "staff who may both": (SHOWN, SHOWN, DONE),
    "superuser": (SHOWN, SHOWN, DONE),
}


def come(who: str, case: Case, *, csrf: bool = False) -> Visitor:
    """Log one of the visitors in."""
    kinds, attributes = VISITORS[who]
    names = {"view": f"view_{case.model._meta.model_name}", "act": case.permission}
    return make_visitor(*(names[kind] for kind in kinds), csrf=csrf, **attributes)


def outcome_of(page: Any) -> object:
    """Return the status, or that somebody has to log in."""
    return LOGIN if page.response.get("Location", "").startswith("/admin/login/") else page.status


@every_case
def test_pages(case: Case) -> None:
    """A user with the view permission gets the list, a row and its history; others nothing."""
    pk, _ = case.make()
    for who in VISITORS:
        visitor = come(who, case)
        pages = {name: visitor.get(url) for name, url in every_page(case.model, pk).items()}
        assert {(who, name): outcome_of(page) for name, page in pages.items()} == {
            (who, name): OUTCOMES[who][0] for name in pages
        }
        if pages["list"].status == SHOWN:
            may_act = OUTCOMES[who][1] == SHOWN
            assert (who, case.decision in pages["list"].decisions) == (who, may_act)
            assert (who, case.decision in pages["change"].decisions) == (who, may_act)


@every_case
@pytest.mark.parametrize("way", WAYS)
def test_forms_of_whoever_may_not(way: str, case: Case) -> None:
    """A form of somebody who may not changes nothing, whether it asks or is confirmed."""
    pk, selection = case.make()
    url, before = every_page(case.model, pk)["list"], case.state(pk)
    for who, (_, asks, confirms) in OUTCOMES.items():
        if confirms == DONE:
            continue
        visitor = come(who, case)
        asked = visitor.take(url, case.decision, selection, **WAYS[way])
        told = visitor.take(url, case.decision, selection, confirmed="1", **WAYS[way])
        assert (who, outcome_of(asked), outcome_of(told)) == (who, asks, confirms)
        assert (who, case.state(pk), LogEntry.objects.count()) == (who, before, 0)


@pytest.mark.long
@every_case
@pytest.mark.parametrize("way", WAYS)
def test_forms_of_whoever_may(way: str, case: Case) -> None:
    """A form of somebody who may changes nothing while it asks, and is logged when confirmed."""
    for who, (_, asks, confirms) in OUTCOMES.items():
        if confirms != DONE:
            continue
        LogEntry.objects.all().delete()
        pk, selection = case.make()
        url, before = every_page(case.model, pk)["list"], case.state(pk)
        visitor = come(who, case)
        asked = visitor.take(url, case.decision, selection, **WAYS[way])
        assert (who, outcome_of(asked)) == (who, asks)
        assert (who, case.state(pk), LogEntry.objects.count()) == (who, before, 0)
        told = visitor.take(url, case.decision, selection, confirmed="1", **WAYS[way])
        assert (who, outcome_of(told)) == (who, DONE)
        assert case.state(pk) != before
        entry = LogEntry.objects.get()
        assert (entry.object_id, entry.user_id) == (str(pk), visitor.user.pk)


@every_case
def test_the_page_that_asks_is_what_is_sent(case: Case) -> None:
    """The fields of the page that asks are enough to confirm the decision."""
    pk, selection = case.make()
    visitor, before = come("staff who may both", case), case.state(pk)
    pages = every_page(case.model, pk)
    asked = visitor.take(pages["list"], case.decision, *visitor.get(pages["change"]).selections)
    assert (asked.decisions, asked.selections) == ([case.decision], [selection])
    visitor.take(pages["list"], *asked.decisions, *asked.selections, confirmed="1")
    assert case.state(pk) != before


@every_case
@pytest.mark.parametrize("confirmed", [{}, {"confirmed": "1"}], ids=["asks", "confirmed"])
def test_without_token(case: Case, confirmed: dict[str, str]) -> None:
    """A form that another site sends, without the token, changes nothing."""
    pk, selection = case.make()
    visitor, before = come("superuser", case, csrf=True), case.state(pk)
    url = every_page(case.model, pk)["list"]
    assert visitor.take(url, case.decision, selection, **confirmed).status == FORBIDDEN
    assert (case.state(pk), LogEntry.objects.count()) == (before, 0)


@every_case
def test_with_token(case: Case) -> None:
    """The forms of the list, of a row and of the page that asks have the token."""
    pk, selection = case.make()
    visitor, before = come("superuser", case, csrf=True), case.state(pk)
    pages = every_page(case.model, pk)
    shown = [visitor.get(pages["list"]), visitor.get(pages["change"])]
    (token, *_) = shown[0].root.find("input", name="csrfmiddlewaretoken")
    form = {"csrfmiddlewaretoken": token.attributes["value"]}
    shown.append(visitor.take(pages["list"], case.decision, selection, **form))
    for page in shown:
        forms = page.root.find("form", method="post")
        assert len(forms) >= 2  # that of the button to log out, and ours
        assert all(each.find("input", name="csrfmiddlewaretoken") for each in forms)
    visitor.take(pages["list"], case.decision, selection, confirmed="1", **form)
    assert case.state(pk) != before


@pytest.mark.long
@every_case
def test_other_methods(case: Case) -> None:
    """Parameters in the URL change nothing, for any user and any method."""
    pk, selection = case.make()
    before, client = case.state(pk), come("superuser", case).client
    query = {"action": case.decision, "_selected_action": selection, "confirmed": "1"}
    for method in ("get", "head", "put", "patch", "delete", "options"):
        for url in every_page(case.model, pk).values():
            getattr(client, method)(url, query_params=query)
        assert (method, case.state(pk), LogEntry.objects.count()) == (method, before, 0)


@every_case
def test_forms_at_other_pages(case: Case) -> None:
    """A form that is sent to the page of a row, or its history, changes nothing."""
    pk, selection = case.make()
    before, visitor = case.state(pk), come("superuser", case)
    pages = every_page(case.model, pk)
    for name in ("change", "history"):
        visitor.take(pages[name], case.decision, selection, confirmed="1")
        visitor.post(pages[name], state="done", status="succeeded", due_at="", _save="1")
    assert (case.state(pk), LogEntry.objects.count()) == (before, 0)


@every_case
def test_another_decision_in_front(case: Case) -> None:
    """A decision that somebody may not take is not let through behind one that is none."""
    pk, selection = case.make()
    before, visitor = case.state(pk), come("staff who may see", case)
    url = every_page(case.model, pk)["list"]
    for index in "0", "1":
        page = visitor.post(
            url,
            action=["none", case.decision],
            index=index,
            _selected_action=selection,
            confirmed="1",
        )
        assert page.status == FORBIDDEN
    assert case.state(pk) == before


@pytest.mark.parametrize("model", sorted(MODELS, key=lambda model: model.__name__))
def test_nothing_is_added_changed_or_deleted(model: type[Model]) -> None:
    """Not even a superuser adds, edits or deletes a row by Django's own pages and action."""
    made = {case.model: case for case in CASES}
    if model is StageStep:
        pk, selection = make_row(rows.work_on(rows.begin(1)))
    else:
        pk, selection = made[model].make()
    visitor = make_visitor(is_superuser=True)
    pages = every_page(model, pk)
    add = reverse(f"admin:django_celery_safe_{model._meta.model_name}_add")
    delete = pages["change"].replace("/change/", "/delete/")
    for url in (add, delete):
        assert visitor.get(url).status == FORBIDDEN
        assert visitor.post(url, post="yes").status == FORBIDDEN
    shown = visitor.get(pages["list"])
    assert "delete_selected" not in shown.decisions
    visitor.take(pages["list"], "delete_selected", selection, post="yes")
    assert visitor.get(pages["list"]).text.count(str(pk))
    if model is not Lock:
        assert visitor.post(pages["change"], _save="1").status == FORBIDDEN
        assert model._default_manager.filter(pk=pk).exists()


def test_every_decision_is_in_the_table() -> None:
    """The table above has every decision that the pages offer, under the permission of its own."""
    from django.contrib import admin
    from django.contrib.auth.models import Permission

    pages = [admin.site.get_model_admin(model) for model in MODELS]
    assert all(isinstance(page, ReadOnlyAdmin) for page in pages)
    offered = {(page.model, each.name) for page in pages for each in page.decisions}
    assert offered == {(case.model, case.decision) for case in CASES}
    ours = Permission.objects.filter(content_type__app_label="django_celery_safe")
    assert set(ours.values_list("codename", flat=True)) == {
        *(case.permission for case in CASES),
        *(f"view_{model._meta.model_name}" for model in MODELS),
    }


@pytest.mark.parametrize(
    ("permissions", "seen"),
    [
        ((), set()),
        (("view_lock",), {"Locks"}),
        (("view_stagerun", "view_stagestep"), {"Runs of stages", "Steps"}),
        (("release_lock", "discard_outboxmessage"), set()),
    ],
)
def test_index(permissions: tuple[str, ...], seen: set[str]) -> None:
    """The admin's start page shows whoever logs in what they may see, and nothing else."""
    visitor = make_visitor(*permissions)
    page = visitor.get(reverse("admin:index"))
    ours = {"Locks", "Outbox messages", "Idempotency records", "Runs of stages", "Steps"}
    heads = {each.text for each in page.root.find("th")}
    assert page.status == SHOWN
    assert heads & ours == seen
    listed = visitor.get(reverse("admin:app_list", args=["django_celery_safe"]))
    assert listed.status == (SHOWN if seen else 404)


def test_a_permission_for_one_decision_is_none_for_another() -> None:
    """A user who may only retry messages may not discard them, however the form is written."""
    row = rows.leave_dead()
    visitor = make_visitor("view_outboxmessage", "retry_outboxmessage")
    url = every_page(OutboxMessage, row.pk)["list"]
    assert set(visitor.get(url).decisions) == {"retry"}
    for actions in (["discard"], ["retry", "discard"], ["discard", "retry"]):
        page = visitor.post(url, action=actions, _selected_action=str(row.pk), confirmed="1")
        assert page.status == FORBIDDEN
    assert OutboxMessage.objects.get() == row
