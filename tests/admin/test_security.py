"""Who may do what, and what a page may need or reveal."""

from typing import Any, Final

import pytest
from django.contrib.admin.models import LogEntry
from django.urls import reverse
from pytest_django import Settings

from django_celery_safe.models import OutboxMessage, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.cases import CASES, Case
from tests.admin.pages import Visitor, every_page, make_visitor
from tests.admin.urls import FIRST, LOCKS, OUTBOX, RECORDS, RUNS, STEPS

LOGIN, FORBIDDEN, SHOWN = "login", 403, 200
#: Users: their permissions, of "view" and "act", other attributes, the answer to a page, and
#: whether they may act.
VISITORS: Final[dict[str, tuple[set[str], dict[str, Any], object, bool]]] = {
    "nobody": ({"view", "act"}, {"is_staff": False}, LOGIN, False),
    "inactive staff": ({"view", "act"}, {"is_active": False}, LOGIN, False),
    "staff": (set(), {}, FORBIDDEN, False),
    "staff who may see": ({"view"}, {}, SHOWN, False),
    "staff who may act": ({"act"}, {}, FORBIDDEN, False),
    "staff who may both": ({"view", "act"}, {}, SHOWN, True),
    "superuser": (set(), {"is_superuser": True}, SHOWN, True),
}
#: Markup that could steer a browser.
EVIL: Final = "\"'><script>alert(1)</script><b style=color:red onclick=alert(2)>{{ x }}</b>"


@pytest.mark.usefixtures("site")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.decision)
def test_who_may_do_what(case: Case) -> None:
    """
    Pages answer each user as the table says, and offer a decision only to those who may take it.

    A form changes a row only if the user may, and only after the question; then it is logged.
    """
    pk = case.make()
    for who, (kinds, attributes, sees, may) in VISITORS.items():
        model = case.model._meta.model_name
        names = {"view": f"view_{model}", "act": f"{case.decision}_{model}"}
        visitor = make_visitor(*(names[kind] for kind in kinds), **attributes)
        pages = {name: visitor.get(url) for name, url in every_page(case.model, pk).items()}
        for page in pages.values():
            to_login = page.response.get("Location", "").startswith("/admin/login/")
            assert (who, LOGIN if to_login else page.status) == (who, sees)
        if sees == SHOWN:
            offered = [case.decision in pages[name].decisions for name in ("list", "change")]
            assert (who, offered) == (who, [may] * 2)
        before = case.state(pk)
        if case.asks or not may:
            # Parameters of a URL are no form, and one without a confirmation only asks.
            visitor.get(case.url, action=case.decision, _selected_action=pk, confirmed="1")
            asked = visitor.take(case.url, case.decision, pk, index="0")
            assert (who, asked.decisions == [case.decision]) == (who, may)
        if not may:
            visitor.confirm(case.url, case.decision, pk)
        assert (who, case.state(pk), LogEntry.objects.count()) == (who, before, 0)
        if may:
            visitor.confirm(case.url, case.decision, pk)
            assert case.state(pk) != before
            entry = LogEntry.objects.get()
            assert (entry.object_id, entry.user_id) == (str(pk), visitor.user.pk)
            entry.delete()
            pk = case.make()


def test_a_permission_for_one_decision_is_none_for_another(site: str) -> None:
    """A user who may only retry messages may not discard them, however the form is written."""
    row = rows.leave_dead()
    visitor = make_visitor("view_outboxmessage", "retry_outboxmessage")
    assert set(visitor.get(OUTBOX).decisions) == {"retry"}
    for actions in (["discard"], ["none", "discard"]):
        for index in ("0", "1"):
            visitor.confirm(OUTBOX, "", row.pk, index=index, action=actions)
    assert OutboxMessage.objects.get() == row


def test_nothing_is_added_changed_or_deleted(root: Visitor) -> None:
    """Not even a superuser adds, edits or deletes a row by Django's own pages and action."""
    makers = {case.model: case.make for case in CASES}
    makers[StageStep] = lambda: rows.work_on(rows.begin(1)).pk
    for model, make in makers.items():
        pages = every_page(model, pk := make())
        add = pages["list"] + "add/"
        for url in (add, pages["change"].replace("/change/", "/delete/"), pages["change"]):
            assert root.client.post(url, {"post": "yes", "_save": "1"}).status_code == FORBIDDEN
        shown = root.get(pages["list"]).rows
        root.take(pages["list"], "delete_selected", pk, post="yes")
        assert len(root.get(pages["list"]).rows) == len(shown) > 0


def test_no_page_needs_a_weaker_policy(root: Visitor) -> None:
    """
    No page has a script, a style or a handler in it, nor lets a text be one.

    On no page two elements have one id, a form is in another, or a field has no label.
    """
    evil = rows.HOLDER._replace(host=EVIL, task=EVIL, task_id=EVIL, arguments=EVIL)
    rows.hold(EVIL, evil)
    record = rows.record(EVIL, "running", rows.LEASE, holder=evil, result=EVIL, error=EVIL)
    run = rows.end(rows.begin(2, 1, params={EVIL: EVIL}), Status.FAILED, error=EVIL)
    step = rows.work_on(rows.begin(1), holder=evil)
    made = [(case, case.make()) for case in CASES]
    OutboxMessage.objects.update(task=EVIL, error=EVIL)
    StageStep.objects.update(task=EVIL, error=EVIL, error_type=EVIL)
    pages = [*map(root.open, (record, run, step)), *map(root.get, (STEPS, FIRST))]
    for case, pk in made:
        pages += map(root.get, every_page(case.model, pk).values())
        pages.append(root.get(case.url, q=EVIL))
        pages += [ask(case.url, case.decision, pk) for ask in (root.take, root.confirm)]
    for page in pages:
        assert (page.status, page.find_inline()) == (200, [])
        assert "<script>alert" not in page.html
        sources = [*page.values("script[src]", "src"), *page.values("link", "href")]
        assert all(url.startswith(("/static/", "/admin/jsi18n/")) for url in sources)
        ids = page.values("[id]", "id")
        assert len(ids) == len(set(ids))
        assert page.texts("form form") == []
        fields = ":is(input, select):not([type=hidden], [type=submit], [aria-label], label *)"
        assert set(page.values(fields, "id")) <= set(page.values("label", "for"))


def test_no_url_reads_more(root: Visitor) -> None:
    """A URL narrows a list only by what it shows."""
    lookups = {OUTBOX: "body", RECORDS: "result", RUNS: "params_text", STEPS: "run__params_text"}
    for url, column in lookups.items():
        assert root.get(url, **{f"{column}__contains": "a"}).status == 400


def test_arguments_hidden(root: Visitor, settings: Settings) -> None:
    """
    Without SHOW_ARGUMENTS no page shows arguments or params, nor what asks for a decision.

    Nor does the log; of locks, messages and runs that were there before either.
    """
    settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "site"}
    rows.hold("feed", rows.HOLDER._replace(arguments=f"('{rows.SECRET}',)"))
    message, run = rows.leave_dead(), rows.begin(2, params={"given": rows.SECRET})
    step = rows.work_on(run)
    StageStep.objects.filter(pk=step.pk).update(params_text=f'{{"returned": "{rows.SECRET}"}}')
    lock = reverse("admin:django_celery_safe_lock_change", args=["feed"])
    for is_shown in (True, False):
        settings.DJANGO_CELERY_SAFE |= {"SHOW_ARGUMENTS": is_shown}
        pages = [*map(root.open, (message, run, step)), *map(root.get, (LOCKS, STEPS, lock))]
        assert {rows.SECRET in page.html for page in pages} == {is_shown}
    for url, decision, pk in [
        (OUTBOX, "discard", message.pk),
        (RUNS, "abort", run.pk),
        (LOCKS, "release", "feed"),
    ]:
        for page in (root.take(url, decision, pk), root.confirm(url, decision, pk)):
            assert rows.SECRET not in page.html
    assert LogEntry.objects.count() == 3
    assert rows.SECRET not in " ".join(each.change_message for each in LogEntry.objects.all())
