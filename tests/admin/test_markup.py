"""No page needs more than a strict Content-Security-Policy allows, whatever it shows."""

from collections.abc import Iterator
from typing import Final

from django.urls import reverse
from pytest_django import Settings

from django_celery_safe.models import IdempotencyRecord, Lock, OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import every_page
from tests.admin.pages import Page, Visitor
from tests.admin.rows import HOLDER, hold
from tests.admin.test_lock_pages import LIST as LOCKS
from tests.admin.test_lock_pages import fragile_redis
from tests.admin.test_table_pages import OUTBOX, RECORDS, RUNS, STEPS
from tests.servers import RedisServer

__all__ = ["fragile_redis"]

#: Markup that could steer a browser.
EVIL: Final = "\"'><script>alert(1)</script><b style=color:red onclick=alert(2)>{{ x }}</b>"
#: Where the style sheets and scripts of a page may come from.
OWN: Final = "/static/"


def every_kind_of_page(root: Visitor) -> Iterator[tuple[str, Page]]:
    """Yield each page that there is, with texts that try to steer it; name it."""
    evil = HOLDER._replace(host=EVIL, task=EVIL, task_id=EVIL, arguments=EVIL, renewed=False)
    for url in (LOCKS, OUTBOX, RECORDS, RUNS, STEPS):
        yield f"empty {url}", root.get(url)
        yield f"searched {url}", root.get(url, q=EVIL)
    token = hold(EVIL, evil)
    messages = [rows.leave_dead(EVIL), rows.leave_failed(EVIL), rows.leave_sent()]
    OutboxMessage.objects.update(task=EVIL, error=EVIL)
    record = rows.record(EVIL, "running", rows.LEASE, holder=evil, result=EVIL, error=EVIL)
    run = rows.end(rows.begin(2, 1, params={EVIL: EVIL}), Status.FAILED, error=EVIL, note=EVIL)
    step = rows.work_on(rows.begin(1), holder=evil)
    StageStep.objects.update(task=EVIL, error=EVIL, error_type=EVIL, note=EVIL)
    pages = {
        Lock: EVIL, OutboxMessage: messages[0].pk, IdempotencyRecord: record.pk,
        StageRun: run.pk, StageStep: step.pk,
    }  # fmt: skip
    for model, pk in pages.items():
        for name, url in every_page(model, pk).items():
            yield f"{name} {model.__name__}", root.get(url)
    selection = root.get(LOCKS).selections
    assert selection[0].startswith(token)
    asked = [
        (LOCKS, "release", selection[0]), (OUTBOX, "retry", messages[0].pk),
        (OUTBOX, "discard", messages[1].pk), (OUTBOX, "discard", messages[2].pk),
        (RECORDS, "forget", record.pk), (RUNS, "resume", run.pk), (RUNS, "abort", run.pk),
    ]  # fmt: skip
    for url, decision, chosen in asked:
        yield f"asks {decision}", root.take(url, decision, chosen)
        yield f"told {decision}", root.confirm(url, decision, chosen)
    yield "asks about nothing", root.take(LOCKS, "release", selection[0])
    for model, pk in pages.items():
        url = every_page(model, pk)["history"]
        yield f"history of what was done {model.__name__}", root.get(url)
    yield "index", root.get(reverse("admin:index"))
    yield "app", root.get(reverse("admin:app_list", args=["django_celery_safe"]))


def test_no_inline_anything(root: Visitor) -> None:
    """No page has a script, a style or a handler in it, nor lets a text be one."""
    shown = 0
    for name, page in every_kind_of_page(root):
        if page.status == 302:  # to the start, since the row is gone
            continue
        shown += 1
        assert page.status == 200, name
        assert page.find_inline() == [], name
        assert "<script>alert" not in page.html, name
        sources = [each.attributes["src"] for each in page.root.find("script")
                   if "src" in each.attributes]  # fmt: skip
        sources += [each.attributes["href"] for each in page.root.find("link")]
        local = (OWN, "/admin/jsi18n/")
        assert [url for url in sources if not url.startswith(local)] == [], name
    assert shown > 40


def test_pages_without_a_store(root: Visitor, fragile_redis: RedisServer) -> None:
    """The page for a store that is down is as strict."""
    fragile_redis.stop()
    for url in (LOCKS, *every_page(Lock, EVIL).values()):
        assert root.get(url).find_inline() == []


def test_well_formed(root: Visitor) -> None:
    """On no page two elements have one id, a form is in another, or a field has no label."""
    for name, page in every_kind_of_page(root):
        ids = [each.attributes["id"] for each in page.root.find() if "id" in each.attributes]
        assert len(ids) == len(set(ids)), name
        assert all(not form.find("form") for form in page.root.find("form")), name
        labelled = {each.attributes.get("for") for each in page.root.find("label")}
        inside = {id(one) for each in page.root.find("label") for one in each.find()}
        for tag in ("input", "select"):
            for field in page.root.find(tag):
                what = field.attributes
                assert (
                    what.get("type") in ("hidden", "submit")
                    or "aria-label" in what
                    or what.get("id") in labelled
                    or id(field) in inside
                ), f"{name}: {what}"


def test_the_finder_of_inline_things() -> None:
    """The search of the tests above finds such markup."""

    class Answer:
        status_code = 200
        content = (
            b"<style>b{}</style><script>x</script><script src=/a.js></script>"
            b"<script type=application/json>{}</script><b style=x>y</b><a onclick=x>y</a>"
            b"<a href='JavaScript:x'>y</a><form action=data:x></form>"
        )

    assert len(Page(Answer()).find_inline()) == 6


class Policy:
    """Middleware that sends a strict Content-Security-Policy."""

    def __init__(self, get_response: object) -> None:
        self.get_response = get_response

    def __call__(self, request: object) -> object:
        response = self.get_response(request)  # type: ignore[operator]
        response["Content-Security-Policy"] = "default-src 'self'"
        return response


def test_with_the_header(root: Visitor, settings: Settings) -> None:
    """Pages are what they are with the header of a strict policy, which none of them changes."""
    settings.MIDDLEWARE = [f"{__name__}.Policy", *settings.MIDDLEWARE]
    token = hold("feed", HOLDER._replace(renewed=False))
    for page in (root.get(LOCKS), root.take(LOCKS, "release", f'{token}"feed"')):
        assert page.response["Content-Security-Policy"] == "default-src 'self'"
        assert page.decisions == ["release"]
