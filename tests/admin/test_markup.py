"""No page needs more than a strict Content-Security-Policy allows, whatever it shows."""

from typing import Final

from django.http import HttpResponse
from django.urls import reverse

from django_celery_safe.models import OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.cases import CASES
from tests.admin.conftest import every_page
from tests.admin.pages import Page, Visitor
from tests.admin.rows import HOLDER, hold

#: Markup that could steer a browser.
EVIL: Final = "\"'><script>alert(1)</script><b style=color:red onclick=alert(2)>{{ x }}</b>"


def test_no_page_needs_a_weaker_policy(root: Visitor) -> None:
    """
    No page has a script, a style or a handler in it, nor lets a text be one.

    On no page two elements have one id, a form is in another, or a field has no label.
    """
    evil = HOLDER._replace(host=EVIL, task=EVIL, task_id=EVIL, arguments=EVIL, renewed=False)
    hold(EVIL, evil)
    record = rows.record(EVIL, "running", rows.LEASE, holder=evil, result=EVIL, error=EVIL)
    run = rows.end(rows.begin(2, 1, params={EVIL: EVIL}), Status.FAILED, error=EVIL, note=EVIL)
    step = rows.work_on(rows.begin(1), holder=evil)
    made = [(case, *case.make()) for case in CASES]
    OutboxMessage.objects.update(task=EVIL, error=EVIL)
    StageStep.objects.update(task=EVIL, error=EVIL, error_type=EVIL, note=EVIL)
    pages = {str(row): root.open(row) for row in (record, run, step)}
    for case, pk, selection in made:
        for name, url in every_page(case.model, pk).items():
            pages[f"{name} {case.decision}"] = root.get(url)
        url = every_page(case.model, pk)["list"]
        pages[f"searched {case.decision}"] = root.get(url, q=EVIL)
        pages[f"asks {case.decision}"] = root.take(url, case.decision, selection)
        pages[f"told {case.decision}"] = root.confirm(url, case.decision, selection)
    pages["steps"] = root.get(every_page(StageStep, 1)["list"])
    pages["history"] = root.get(every_page(StageRun, made[-1][1])["history"])
    pages["app"] = root.get(reverse("admin:app_list", args=["django_celery_safe"]))
    for name, page in pages.items():
        assert page.status == 200, name
        assert page.find_inline() == [], name
        assert "<script>alert" not in page.html, name
        sources = [each.attributes.get("src", "/static/") for each in page.root.find("script")]
        sources += [each.attributes["href"] for each in page.root.find("link")]
        assert all(url.startswith(("/static/", "/admin/jsi18n/")) for url in sources), name
        ids = [each.attributes["id"] for each in page.root.find() if "id" in each.attributes]
        assert len(ids) == len(set(ids)), name
        assert all(not form.find("form") for form in page.root.find("form")), name
        labels = page.root.find("label")
        labelled = {each.attributes.get("for") for each in labels}
        inside = {id(one) for each in labels for one in each.find()}
        for field in page.root.find("input") + page.root.find("select"):
            what = field.attributes
            assert (
                what.get("type") in ("hidden", "submit")
                or "aria-label" in what
                or what.get("id") in labelled
                or id(field) in inside
            ), f"{name}: {what}"


def test_the_finder_of_inline_things() -> None:
    """The search of the test above finds such markup."""
    content = (
        b"<style>b{}</style><script>x</script><script src=/a.js></script>"
        b"<script type=application/json>{}</script><b style=x>y</b><a onclick=x>y</a>"
        b"<a href='JavaScript:x'>y</a><form action=data:x></form>"
    )
    assert len(Page(HttpResponse(content)).find_inline()) == 6
