"""What only a browser shows: pages as they look, the policy, and decisions in the admin."""

import sys

import pytest
from playwright.sync_api import Page, expect

from demo.mail_server import MailServer
from tests.browser.conftest import Screenshot
from tests.example.site import EXAMPLE, POLICY, Site
from tests.processes import KeptProcess, wait_for

pytestmark = pytest.mark.nightly

PASSWORD = "correct horse battery"
#: The lock of a process that is killed.
LOCK = "backup:nightly"
APP = "/admin/django_celery_safe"


def test_signing_up_sends_one_mail(page: Page, mail: MailServer, screenshot: Screenshot) -> None:
    """A user who signs up is told what is missing, and gets one e-mail."""
    page.goto("/")
    screenshot(page, "home")
    page.get_by_role("link", name="Sign up").first.click()
    page.get_by_role("button", name="Create my account").click()
    expect(page.get_by_text("This field is required.")).to_have_count(4)
    page.get_by_label("Username").fill("nora")
    page.get_by_label("Email").fill("nora@example.com")
    page.get_by_label("Password:", exact=True).fill(PASSWORD)
    page.get_by_label("Password confirmation").fill(PASSWORD)
    page.get_by_role("button", name="Create my account").click()
    expect(page.get_by_role("status")).to_contain_text("Welcome, nora.")
    wait_for(lambda: mail.accepted["nora@example.com"], 30, "no e-mail came")
    page.goto("/albums/")
    page.get_by_role("button", name="Make an album").click()
    expect(page.get_by_text("100 %")).to_be_visible()
    screenshot(page, "album")
    assert mail.accepted["nora@example.com"] == 1


def test_lock_of_a_killed_process_is_released(
    page: Page, site: Site, expected: list[str], screenshot: Screenshot
) -> None:
    """Staff see in the admin what there is, on a phone too, and free what a dead process holds."""
    site.execute(FILL)
    holder = KeptProcess(
        [sys.executable, "-c", HOLD],
        folder=EXAMPLE,
        log_path=site.folder / "holder.log",
        env={**site.env, "DJANGO_SETTINGS_MODULE": "example_project.settings"},
    )
    with holder:
        wait_for(lambda: "held" in holder.log, 30, "the lock was not taken")
        pid = holder.pid
        holder.kill()
    page.goto("/admin/login/?next=/admin/")
    page.get_by_label("Username").fill("staff")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    for url in ("", "stagerun/", "outboxmessage/", "lock/"):
        answer = page.goto(f"{APP}/{url}")
        assert answer.headers["content-security-policy"] == POLICY
        screenshot(page, f"admin-{url.rstrip('/') or 'first'}")
    page.locator("#action-toggle").check()
    expect(page.locator(".action-counter")).to_have_text("1 of 1 selected")
    page.locator("select[name=action]").select_option(label="Release")
    page.locator(".actions button").click()
    expect(page.locator(".safe-rows li")).to_contain_text([f" pid {pid};"])
    screenshot(page, "admin-confirm")
    page.locator("#content").get_by_role("button", name="Release").click()
    expect(page.locator(".messagelist li")).to_contain_text(["Released: 1 lock."])
    page.goto(f"{APP}/lock/{LOCK}/change/")
    expect(page.get_by_text("Nobody holds this lock now.")).to_be_visible()
    page.get_by_role("link", name="History").click()
    expect(page.locator("#change-history tbody tr")).to_contain_text([f" pid {pid};"])
    expected.append("403")
    page.goto(f"{APP}/idempotencyrecord/")
    expect(page.get_by_text("403 Forbidden")).to_be_visible()


#: Holds a lock until the process is killed.
HOLD = f"""if True:
    import signal, django
    django.setup()
    from django_celery_safe import cache_lock
    lock = cache_lock({LOCK!r}, timeout=600)
    assert lock.acquire()
    print("held", flush=True)
    signal.pause()
"""
#: Makes staff, and leaves messages and runs in each state, and some that ended in the last day.
FILL = f"""
    from datetime import timedelta
    from accounts.models import User
    from django.contrib.auth.models import Permission
    from django.db import connection, transaction
    from django.db.models.functions import Now
    from django_celery_safe.models import OutboxMessage, OutboxRelay, StageRun, StageStep
    from orders.tasks import place_order
    staff = User.objects.create_user("staff", password={PASSWORD!r}, is_staff=True)
    staff.user_permissions.set(
        Permission.objects.filter(content_type__app_label="django_celery_safe").exclude(
            codename__contains="idempotency"))
    OutboxRelay.objects.create(host="web1", pid=4711, seen_at=Now())
    rows = OutboxMessage.objects.all()
    failed = {{"state": "failed", "due_at": None, "ended_at": Now()}}
    for changes in ({{}}, {{"state": "sent", "due_at": None, "sent_at": Now()}}, {{}},
                    {{**failed, "error_type": "ValueError", "error": "the order has no address"}}):
        with transaction.atomic():
            place_order("nora@example.com")
            connection.run_on_commit.clear()
        rows.filter(pk=rows.latest("pk").pk).update(created_at=Now(), **changes)
    unsent = rows.filter(due_at__isnull=False).latest("pk")
    unsent.attempts = 19
    unsent.fail("AccessRefused: (403) access to exchange 'orders' in vhost "
                "'eu-west-1b.internal.example.com' refused for user 'shop'", attempts=20)
    rows.filter(pk=unsent.pk).update(created_at=Now() - timedelta(hours=2))
    rows.bulk_create([
        OutboxMessage(task="orders.tasks.ship", task_id=f"{{hour}}-{{n}}", body=b"", properties="",
                      state="done", created_at=Now(), ended_at=Now() - timedelta(hours=hour + 0.5))
        for hour in range(24) for n in range((hour * 7 + 3) % 6)
    ])
    ago = timedelta(minutes=40)
    for name, status, done, failed in [
        ("Lisbon", "succeeded", 7, 0), ("Kyoto", "failed", 2, 1), ("Oslo", "running", 5, 0)
    ]:
        run = StageRun(name=name, status=status, stages=1, created_at=Now() - ago)
        run.ended_at = None if status == "running" else Now() - ago / 2
        run.save()
        statuses = done * ["succeeded"] + failed * ["failed"] + (7 - done - failed) * ["waiting"]
        StageStep.objects.bulk_create([
            StageStep(run=run, stage=1, position=n, priority=0, task="albums.tasks.make_page",
                      task_id=f"{{run.pk}}-{{n}}", status=each,
                      **({{"error": "OSError: page-3.jpg is torn"}} if each == "failed" else {{}}))
            for n, each in enumerate(statuses)
        ])
"""
