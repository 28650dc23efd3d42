"""The admin's pages in a browser: their contents, and their decisions."""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from playwright.sync_api import Locator, Page, expect

from demo.feed_server import FeedServer
from demo.mail_server import MailServer
from tests.browser.conftest import SCREENS, Screenshot
from tests.browser.pages import Troubles
from tests.browser.staff import login, make_staff
from tests.example.site import EXAMPLE, Site
from tests.processes import KeptProcess, wait_for
from tests.servers import RedisServer

pytestmark = pytest.mark.nightly

APP = "/admin/django_celery_safe"
LOCKS, OUTBOX, RECORDS = f"{APP}/lock/", f"{APP}/outboxmessage/", f"{APP}/idempotencyrecord/"
RUNS, STEPS = f"{APP}/stagerun/", f"{APP}/stagestep/"
FEED = "night-baker.rss"
#: An error as libraries raise them: long, and with few places to break it.
ERROR = (
    "OperationalError: [Errno 111] Connection refused to "
    "amqp://orders:**@broker-eu-west-1b.internal.example.com:5672/orders-production"
)

Hold = Callable[..., KeptProcess]


@pytest.fixture(autouse=True)
def _nothing_there(site: Site) -> Iterator[None]:
    """Begin with empty pages, and leave none of ours to the tests of other modules."""
    empty(site)
    yield
    empty(site)


def empty(site: Site) -> None:
    """Free all locks, and delete all rows."""
    site.execute("""
        from django_celery_safe import iter_locks, release_lock
        from django_celery_safe.models import IdempotencyRecord, OutboxMessage, StageRun
        for held in list(iter_locks()):
            release_lock(held)
        for model in (IdempotencyRecord, OutboxMessage, StageRun):
            model.objects.all().delete()
    """)


@pytest.fixture
def hold(site: Site) -> Iterator[Hold]:
    """Start processes of the site that hold locks until they are killed."""
    with ExitStack() as stack:

        def start(*names: str, timeout: float = 600, renew: bool = False) -> KeptProcess:
            code = f"""if True:
                import logging, signal, django
                django.setup()
                logging.basicConfig()
                from django_celery_safe import cache_lock
                locks = [cache_lock(name, timeout={timeout}, renew={renew}) for name in {names}]
                assert all(lock.acquire() for lock in locks)
                print("held", flush=True)
                signal.pause()
            """
            holder = KeptProcess(
                [sys.executable, "-c", code],
                folder=EXAMPLE,
                log_path=site.folder / f"holder-{len(names)}-{renew}.log",
                env={**site.env, "DJANGO_SETTINGS_MODULE": "example_project.settings"},
            )
            holder.log_path.unlink(missing_ok=True)
            stack.enter_context(holder)
            wait_for(lambda: "held" in holder.log, 30, "the locks were not taken")
            return holder

        yield start


@pytest.fixture
def look(screenshot: Screenshot) -> Screenshot:
    """Take pictures of a page, on which nobody with a phone has to scroll sideways."""

    def take(page: Page, name: str) -> None:
        screenshot(page, name)
        before, (width, height) = page.viewport_size, SCREENS["phone"]
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert before is not None
        page.set_viewport_size(before)

    return take


def enter(page: Page, site: Site, *permissions: str) -> None:
    """Log in as staff with these permissions of the app's."""
    login(page, make_staff(site, *(f"django_celery_safe.{each}" for each in permissions)))


def row_of(page: Page, text: str) -> Locator:
    """Return the rows of the list that have a text."""
    return page.locator("#result_list tbody tr", has_text=text)


def expect_message(page: Page, text: str) -> None:
    """Expect the page to tell this of what was done before."""
    expect(page.locator(".messagelist li")).to_contain_text([text])


def expect_no_decisions(page: Page) -> None:
    """Expect the page to offer nothing but to look."""
    expect(page.locator("#content")).to_be_visible()
    expect(page.locator("select[name=action], .action-select, .safe-decision")).to_have_count(0)
    expect(page.locator("#content input[type=submit]:not([value=Search])")).to_have_count(0)


def choose(page: Page, label: str, *texts: str) -> None:
    """Select the rows that have these texts and an action, and press the button."""
    for text in texts:
        row_of(page, text).locator(".action-select").check()
    page.get_by_label("Action:").select_option(label=label)
    page.get_by_role("button", name="Go").click()
    expect(page.get_by_role("heading", name="are you sure?")).to_be_visible()


def confirm(page: Page, label: str, *, forced: bool = False) -> None:
    """Confirm what the page asks about."""
    if forced:
        page.get_by_role("checkbox").check()
    page.locator("#content").get_by_role("button", name=label).click()


def expect_history(page: Page, text: str) -> None:
    """Expect the history of the row whose page is shown to tell of something."""
    page.get_by_role("link", name="History").click()
    expect(page.locator("#change-history tbody tr")).to_contain_text([text])


# Users who may only look


def test_running_import_is_seen(
    page: Page, site: Site, feeds: FeedServer, look: Screenshot
) -> None:
    """Such a user sees each import's process, feed and start, and can change nothing."""
    url = feeds.url(FEED)
    enter(page, site, "view_lock")
    page.goto(LOCKS)
    expect(page.get_by_text("No lock is held.")).to_be_visible()
    look(page, "admin-locks-empty")
    feeds.hold(FEED)
    try:
        task_id = import_feed(site, url)
        wait_for(lambda: feeds.fetches(FEED).active == 1, 30, "the import did not begin")
        page.goto(f"{LOCKS}?task=feeds.tasks.import_feed")
        row = row_of(page, "pid ")
        expect(row).to_contain_text(f"('{url}',)")
        expect(row).to_contain_text(task_id)
        expect(row).to_contain_text(re.compile(r"\d+\.\ds"))
        (pid,) = re.findall(r"pid (\d+) on \S+", row.inner_text())
        assert int(pid) in {child.pid for child in site.worker.children()}
        expect_no_decisions(page)
        look(page, "admin-locks")
        row.get_by_role("link").click()
        for head, text in (("Process", f"pid {pid} on"), ("Task id", task_id), ("Holder", "lives")):
            expect(page.get_by_role("row", name=f"{head} {text}")).to_be_visible()
        expect_no_decisions(page)
        look(page, "admin-lock")
    finally:
        feeds.release(FEED)
    wait_for(lambda: feeds.fetches(FEED).active == 0)
    wait_for(lambda: page.reload() is not None and "Nobody holds" in page.content())
    look(page, "admin-lock-free")


def import_feed(site: Site, url: str) -> str:
    """Send the import of a feed; return the task's id."""
    return site.execute(f"""
        from feeds.tasks import import_feed
        print(import_feed.delay({url!r}).id)
    """).strip()


def test_messages_are_seen(page: Page, site: Site, look: Screenshot) -> None:
    """Such a user sees waiting and sent messages, and failed ones with their errors."""
    enter(page, site, "view_outboxmessage")
    page.goto(OUTBOX)
    look(page, "admin-outbox-empty")
    waits, dead, sent = (leave_message(site, each) for each in ("pending", "dead", "sent"))
    page.goto(OUTBOX)
    expect(row_of(page, waits)).to_contain_text("pending")
    expect(row_of(page, dead)).to_contain_text("Connection refused")
    expect(row_of(page, sent)).to_contain_text("sent")
    expect_no_decisions(page)
    look(page, "admin-outbox")
    page.get_by_role("link", name="Dead").click()
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    row_of(page, dead).get_by_role("link").click()
    expect(page.locator(".field-error .readonly")).to_have_text(ERROR)
    expect_no_decisions(page)
    look(page, "admin-message")


def test_the_first_page(page: Page, site: Site, hold: Hold, look: Screenshot) -> None:
    """The app's page says how everything is, and a figure leads to its rows."""
    enter(page, site, "view_outboxmessage", "view_lock", "view_stagerun")
    page.get_by_role("link", name="Celery safe", exact=True).first.click()
    expect(page.get_by_text("A bar for each hour will be here")).to_be_visible()
    look(page, "admin-first-empty")
    leave_message(site, "dead")
    site.execute("""
        from datetime import timedelta
        from django.db.models.functions import Now
        from django_celery_safe.models import OutboxMessage, StageRun
        for hour in range(20):
            status = "failed" if hour % 7 == 3 else "succeeded"
            StageRun.objects.bulk_create([
                StageRun(status=status, stages=1, created_at=Now(), stage_at=Now(),
                         ended_at=Now() - timedelta(hours=hour + 0.5))
                for _ in range(1 + hour % 5)
            ])
    """)
    hold("import:feeds")
    page.reload()
    expect(page.get_by_role("img", name="ended well and")).to_be_visible()
    expect(page.locator(".safe-card", has_text="Locks overdue")).to_contain_text("of 1 held")
    look(page, "admin-first")
    page.get_by_text("The same as a table").click()
    expect(page.get_by_role("row", name="1 to 0 h ago")).to_be_visible()
    page.locator(".safe-card", has_text="Dead").get_by_role("link").click()
    expect(page.locator("#result_list tbody tr")).to_have_count(1)


def leave_message(site: Site, state: str, name: str = "") -> str:
    """Let the welcome e-mail of a new user be in the outbox; return the task's id."""
    changes = {
        "pending": "None",
        "dead": f"row.fail({ERROR!r}, attempts=1)",
        "sent": "rows.filter(pk=row.pk).update(due_at=None, sent_at=Now())",
    }[state]
    name = name or f"user-{state}"
    return site.execute(f"""
        from django.db import connection, transaction
        from django.db.models.functions import Now
        from accounts.models import User
        from accounts.tasks import send_welcome_email
        from django_celery_safe.models import OutboxMessage
        rows = OutboxMessage.objects.all()
        with transaction.atomic():
            User.objects.filter(username={name!r}).delete()
            user = User.objects.create_user({name!r}, "{name}@example.com")
            send_welcome_email.delay_on_commit(user.pk)
            connection.run_on_commit.clear()
        row = rows.latest("pk")
        {changes}
        print(row.task_id)
    """).strip()


def test_records_are_seen(page: Page, site: Site, mail: MailServer, look: Screenshot) -> None:
    """Such a user sees the work that is under way, with its process, and finished work."""
    enter(page, site, "view_idempotencyrecord")
    page.goto(RECORDS)
    look(page, "admin-records-empty")
    done = mail_digest(site, "digest-done")
    wait_for(lambda: mail.accepted["digest-done@example.com"] == 1, 30)
    mail.hold("digest-slow@example.com")
    try:
        running = mail_digest(site, "digest-slow")
        wait_for(lambda: mail.met_hold["digest-slow@example.com"] == 1, 30)
        page.goto(RECORDS)
        expect(row_of(page, running)).to_contain_text("running")
        expect(row_of(page, done)).to_contain_text("done")
        expect_no_decisions(page)
        look(page, "admin-records")
        row_of(page, running).get_by_role("link").click()
        expect(page.locator(".field-process")).to_contain_text(re.compile(r"pid \d+ on \S+"))
        expect(page.locator(".field-lease_left")).to_contain_text(re.compile(r"\d\.\ds"))
        expect_no_decisions(page)
        look(page, "admin-record")
    finally:
        mail.release("digest-slow@example.com")
    wait_for(lambda: mail.accepted["digest-slow@example.com"] == 1, 30)


def mail_digest(site: Site, name: str) -> str:
    """Mail a new user their digest; return the key of its record."""
    return site.execute(f"""
        from accounts.models import User
        from feeds.tasks import mail_digest
        User.objects.filter(username={name!r}).delete()
        user = User.objects.create_user({name!r}, "{name}@example.com")
        mail_digest.delay(user.pk, "2026-11-21")
        print(f"feeds.tasks.mail_digest:{{user.pk}}:2026-11-21")
    """).strip()


def test_runs_are_seen(page: Page, site: Site, mail: MailServer, look: Screenshot) -> None:
    """Such a user sees the progress of runs, their stages, and the process of each step."""
    enter(page, site, "view_stagerun", "view_stagestep")
    page.goto(RUNS)
    look(page, "admin-runs-empty")
    done, failed = make_album(site, "ready"), make_album(site, "torn", broken=True)
    mail.hold("held@example.com")
    try:
        running = make_album(site, "held")
        wait_for(lambda: mail.met_hold["held@example.com"] == 1, 30)
        wait_until(site, failed, "failed")
        wait_until(site, done, "succeeded")
        page.goto(RUNS)
        row = row_of(page, running)
        expect(row).to_contain_text("Running")
        bar = row.get_by_role("progressbar", name="6 of 7 steps done")
        expect(bar).to_have_js_property("position", 6 / 7)
        expect(row_of(page, failed)).to_contain_text("Failed")
        expect_no_decisions(page)
        look(page, "admin-runs")
        row.get_by_role("link", name=running).click()
        stages = page.locator(".safe-stages tbody tr")
        expect(stages).to_have_count(4)
        expect(stages.nth(0)).to_contain_text("2 succeeded")
        expect(stages.nth(3)).to_contain_text("1 running")
        expect_no_decisions(page)
        look(page, "admin-run")
        page.get_by_role("link", name="All steps of this run").click()
        expect(page.locator("#result_list tbody tr")).to_have_count(7)
        step = row_of(page, "albums.tasks.notify")
        expect(step).to_contain_text(re.compile(r"pid \d+ on \S+"))
        expect_no_decisions(page)
        look(page, "admin-steps")
        step.get_by_role("link", name="albums.tasks.notify").click()
        expect(page.locator(".field-lease_left")).to_contain_text(re.compile(r"\d\.\ds"))
        expect_no_decisions(page)
        look(page, "admin-step")
    finally:
        mail.release("held@example.com")
    wait_until(site, running, "succeeded")
    page.goto(f"{RUNS}{failed.removeprefix('Run ')}/change/")
    expect(page.locator(".field-fault")).to_contain_text("albums.tasks.fetch")
    look(page, "admin-run-failed")


def make_album(site: Site, name: str, *, broken: bool = False) -> str:
    """Begin an album of two pictures, one of them none if it is broken; return its run's name."""
    return site.execute(f"""
        from django.core.files.base import ContentFile
        from albums import samples
        from albums.making import create_album
        paintings = [samples.paint(each) for each in list(samples.SCENERIES)[:2]]
        if {broken}:
            paintings[1] = b"torn"
        files = [ContentFile(each, name=f"{{n}}.jpg") for n, each in enumerate(paintings)]
        print("Run", create_album({name!r}, "{name}@example.com", files).run_id)
    """).strip()


def wait_until(site: Site, run: str, status: str) -> None:
    """Wait until a run has this status."""
    site.execute(f"""
        import time
        from django_celery_safe.models import StageRun
        until = time.monotonic() + 30
        while StageRun.objects.get(pk={run.removeprefix("Run ")}).status != {status!r}:
            assert time.monotonic() < until
            time.sleep(0.05)
    """)


@pytest.mark.parametrize("url", [LOCKS, OUTBOX, RECORDS, RUNS, STEPS])
def test_nothing_to_see_without_a_permission(
    page: Page, site: Site, troubles: Troubles, url: str
) -> None:
    """A user without permission is refused, and the admin's start page has no links."""
    enter(page, site)
    expect(page.get_by_role("link", name="Celery")).to_have_count(0)
    troubles.allow("403")
    answer = page.goto(url)
    assert answer is not None
    assert answer.status == 403
    expect(page.get_by_role("heading", name="403 Forbidden")).to_be_visible()
    assert troubles.seen


# Users who may decide


def test_lock_of_a_killed_process_is_released(
    page: Page, site: Site, hold: Hold, look: Screenshot
) -> None:
    """The lock of a killed process is freed after a confirmation that shows it."""
    name = "backup:nightly"
    holder = hold(name)
    pid = holder.pid
    holder.kill()
    enter(page, site, "view_lock", "release_lock")
    page.goto(LOCKS)
    look(page, "admin-locks-release")
    choose(page, "Release selected locks", name)
    asked = page.locator(".safe-rows li")
    expect(asked).to_contain_text([name])
    expect(asked).to_contain_text([f"pid {pid} on "])
    look(page, "admin-confirm-release")
    confirm(page, "Release")
    expect_message(page, "1 lock was released.")
    expect(row_of(page, name)).to_have_count(0)
    page.goto(f"{LOCKS}{name}/change/")
    expect(page.get_by_text("Nobody holds this lock now.")).to_be_visible()
    expect_history(page, f"Was released: held by pid {pid} on ")
    look(page, "admin-history")


def test_renewed_lock_needs_the_box(page: Page, site: Site, hold: Hold, look: Screenshot) -> None:
    """A lock whose holder lives stays, unless the box is ticked; then the holder finds out."""
    name = "reindex:products"
    holder = hold(name, timeout=3, renew=True)
    enter(page, site, "view_lock", "release_lock")
    page.goto(LOCKS)
    row_of(page, name).get_by_role("link").click()
    look(page, "admin-lock-release")
    page.get_by_role("button", name="Release").click()
    confirm(page, "Release")
    expect_message(page, f"The lock {name} stays: ")
    expect(row_of(page, name)).to_have_count(1)
    look(page, "admin-locks-refused")
    choose(page, "Release selected locks", name)
    confirm(page, "Release", forced=True)
    expect_message(page, "1 lock was released.")
    expect(row_of(page, name)).to_have_count(0)
    wait_for(lambda: f"'{name}'" in holder.log, 10, "the holder did not find out")
    assert holder.running


def test_select_all_and_think_better_of_it(page: Page, site: Site, hold: Hold) -> None:
    """The box above the list selects all, the counter counts them, and going back frees none."""
    hold("export:1", "export:2", "export:3")
    enter(page, site, "view_lock", "release_lock")
    page.goto(LOCKS)
    counter = page.locator(".action-counter")
    expect(counter).to_have_text("0 of 3 selected")
    page.locator("#action-toggle").check()
    expect(counter).to_have_text("3 of 3 selected")
    row_of(page, "export:2").locator(".action-select").uncheck()
    expect(counter).to_have_text("2 of 3 selected")
    expect(page.locator("#action-toggle")).not_to_be_checked()
    choose(page, "Release selected locks")
    expect(page.locator(".safe-rows li")).to_have_count(2)
    page.get_by_role("link", name="No, take me back").click()
    expect(page).to_have_url(f"{site.url}{LOCKS}")
    expect(page.locator("#result_list tbody tr")).to_have_count(3)


def test_locks_fit_on_a_phone(page: Page, site: Site, hold: Hold, look: Screenshot) -> None:
    """On a phone all that is known of a lock is in sight, however long its name is."""
    width, height = SCREENS["phone"]
    hold("export:1", "prices:" + "https://shop.example.com/en-gb/catalogue/" * 4)
    enter(page, site, "view_lock", "release_lock")
    page.set_viewport_size({"width": width, "height": height})
    page.goto(LOCKS)
    results = page.locator(".results")
    assert results.evaluate("each => each.scrollWidth - each.clientWidth") == 0
    page.get_by_label("Select all objects").check()
    expect(page.locator(".action-counter")).to_have_text("2 of 2 selected")
    look(page, "admin-locks-long")


def test_dead_message_is_retried(
    page: Page, site: Site, mail: MailServer, look: Screenshot
) -> None:
    """A message that failed for good is sent after all, once somebody wants it."""
    task_id = leave_message(site, "dead", "late")
    enter(page, site, "view_outboxmessage", "retry_outboxmessage")
    page.goto(f"{OUTBOX}?state=dead")
    look(page, "admin-outbox-retry")
    choose(page, "Retry selected outbox messages", task_id)
    expect(page.locator(".safe-rows li")).to_contain_text([ERROR])
    look(page, "admin-confirm-retry")
    confirm(page, "Retry")
    expect_message(page, "1 outbox message was made due.")
    page.goto(OUTBOX)
    expect(row_of(page, task_id)).to_contain_text("pending")
    row_of(page, task_id).get_by_role("link").click()
    look(page, "admin-message-retry")
    expect_history(page, "Was made due: dead, ")
    assert mail.accepted["late@example.com"] == 0
    with site.relay():
        wait_for(lambda: mail.accepted["late@example.com"] == 1, 40)


def test_message_is_discarded(page: Page, site: Site, look: Screenshot) -> None:
    """Discarded messages are gone from the list; others stay."""
    stays, goes = leave_message(site, "dead"), leave_message(site, "pending")
    enter(page, site, "view_outboxmessage", "discard_outboxmessage")
    page.goto(OUTBOX)
    choose(page, "Discard selected outbox messages", goes)
    look(page, "admin-confirm-discard")
    confirm(page, "Discard")
    expect_message(page, "1 outbox message was discarded.")
    expect(row_of(page, goes)).to_have_count(0)
    expect(row_of(page, stays)).to_have_count(1)


def test_forgotten_record_is_done_again(
    page: Page, site: Site, mail: MailServer, look: Screenshot
) -> None:
    """A record that is forgotten from its own page keeps nobody from doing it once more."""
    key = mail_digest(site, "again")
    wait_for(lambda: mail.accepted["again@example.com"] == 1, 30)
    enter(page, site, "view_idempotencyrecord", "forget_idempotencyrecord")
    page.goto(RECORDS)
    row_of(page, key).get_by_role("link").click()
    look(page, "admin-record-forget")
    page.get_by_role("button", name="Forget").click()
    expect(page.locator(".safe-rows li")).to_contain_text([key])
    look(page, "admin-confirm-forget")
    confirm(page, "Forget")
    expect_message(page, "1 idempotency record was forgotten.")
    expect(row_of(page, key)).to_have_count(0)
    _, user, day = key.split(":")
    site.execute(f"""
        from feeds.tasks import mail_digest
        mail_digest.delay({user}, {day!r})
    """)
    wait_for(lambda: mail.accepted["again@example.com"] == 2, 30)


def test_failed_run_is_resumed(page: Page, site: Site, mail: MailServer, look: Screenshot) -> None:
    """A run goes on from its own page's button, once what it failed of is mended."""
    run = make_album(site, "mended", broken=True)
    wait_until(site, run, "failed")
    enter(page, site, "view_stagerun", "resume_stagerun")
    page.goto(RUNS)
    row_of(page, run).get_by_role("link", name=run).click()
    look(page, "admin-run-resume")
    site.execute("""
        from albums.making import remove_picture
        from albums.models import Picture
        remove_picture(Picture.objects.latest("pk"))
    """)
    page.get_by_role("button", name="Resume").click()
    look(page, "admin-confirm-resume")
    confirm(page, "Resume")
    expect_message(page, "1 run of stages was resumed.")
    wait_until(site, run, "succeeded")
    page.reload()
    expect(row_of(page, run)).to_contain_text("Succeeded")
    wait_for(lambda: mail.accepted["mended@example.com"] == 1)


def test_run_is_aborted(page: Page, site: Site, mail: MailServer, look: Screenshot) -> None:
    """No step of an aborted run runs, even if the worker gets its message later."""
    enter(page, site, "view_stagerun", "abort_stagerun")
    site.worker.pause()
    try:
        run = make_album(site, "unwanted")
        page.goto(RUNS)
        choose(page, "Abort selected runs of stages", run)
        look(page, "admin-confirm-abort")
        confirm(page, "Abort")
        expect_message(page, "1 run of stages was aborted.")
    finally:
        site.worker.resume()
    # Its messages were sent after those of the other.
    wait_until(site, make_album(site, "wanted"), "succeeded")
    page.reload()
    expect(row_of(page, run)).to_contain_text("Aborted")
    expect(row_of(page, run)).to_contain_text("0/7")
    assert mail.accepted["unwanted@example.com"] == 0
    row_of(page, run).get_by_role("link", name=run).click()
    # A user who may not see steps gets no link to them.
    expect(page.get_by_role("link", name="All steps of this run")).to_have_count(0)
    look(page, "admin-run-aborted")
    expect_history(page, "Was aborted: waiting, 0 of 7 steps done.")


# When it can't be known


def test_store_that_is_down_is_no_empty_list(
    page: Page,
    site: Site,
    lock_server: RedisServer,
    troubles: Troubles,
    hold: Hold,
    look: Screenshot,
) -> None:
    """While the locks' server is away the pages say that they could not ask, and not "none"."""
    hold("export:1")
    enter(page, site, "view_lock", "release_lock")
    page.goto(LOCKS)
    troubles.allow("503")
    lock_server.stop()
    try:
        choose_anyway(page, "export:1")
        look(page, "admin-release-failed")
        for url, shot in ((LOCKS, "locks-down"), (f"{LOCKS}export:1/change/", "lock-down")):
            answer = page.goto(url)
            assert answer is not None
            assert answer.status == 503
            expect(page.locator(".errornote")).to_be_visible()
            expect(page.get_by_text(re.compile("No lock is held|Nobody holds"))).to_have_count(0)
            look(page, f"admin-{shot}")
    finally:
        lock_server.start()
    page.goto(LOCKS)
    expect(page.locator(".errornote")).to_have_count(0)


def choose_anyway(page: Page, name: str) -> None:
    """Ask for the release of a lock, and be told that its store does not answer."""
    row_of(page, name).locator(".action-select").check()
    page.get_by_label("Action:").select_option(label="Release selected locks")
    page.get_by_role("button", name="Go").click()
    expect(page.locator(".messagelist .error")).to_be_visible()
