"""The purposes of the site, seen by its visitors."""

import re
import time
from collections.abc import Callable

import pytest
from playwright.sync_api import FilePayload, Page, expect

from albums import samples
from demo.feed_server import FeedServer
from demo.mail_server import MailServer
from tests.browser.conftest import Screenshot
from tests.example.site import Site
from tests.processes import wait_for

pytestmark = pytest.mark.nightly

FEED = "harbour-notes.rss"
PASSWORD = "correct horse battery"
TASK_ID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


def sign_up(page: Page, name: str) -> None:
    """Fill in the form, and send it."""
    page.goto("/accounts/sign-up/")
    page.get_by_label("Username").fill(name)
    page.get_by_label("Email").fill(f"{name}@example.com")
    page.get_by_label("Password:", exact=True).fill(PASSWORD)
    page.get_by_label("Password confirmation").fill(PASSWORD)
    page.get_by_role("button", name="Create my account").click()
    expect(page.get_by_role("status")).to_contain_text(f"Welcome, {name}.")


def test_signing_up_sends_one_mail(
    new_page: Callable[[], Page], mail: MailServer, screenshot: Screenshot
) -> None:
    """A user who signs up gets one e-mail, and the start page shows the count rise."""
    watching, visiting = new_page(), new_page()
    watching.goto("/")
    before = int(watching.locator("#welcomed").inner_text())
    sign_up(visiting, "nora")
    screenshot(visiting, "signed-up")
    expect(watching.locator("#welcomed")).to_have_text(str(before + 1))
    assert mail.accepted["nora@example.com"] == 1


def test_two_clicks_at_once_import_once(
    new_page: Callable[[], Page], site: Site, feeds: FeedServer, screenshot: Screenshot
) -> None:
    """Two users press the button at the same moment: one import starts, and both get its id."""
    url = feeds.url(FEED)
    feeds.hold(FEED)
    first, second, watching = new_page(), new_page(), new_page()
    for page in (first, second):
        page.goto("/feeds/")
        page.get_by_label("Feed URL").fill(url)
    click_at_once(first, second)
    told = [page.get_by_role("status").inner_text() for page in (first, second)]
    told.sort(key=lambda text: "already" in text)
    (task_id,) = re.findall(TASK_ID, told[0])
    assert f"The import of {url} was sent, as task {task_id}." in told[0]
    assert f"The import of {url} is on its way already, as task {task_id}." in told[1]

    watching.goto("/")
    lock = watching.locator("#locks li", has_text="runs").filter(has_text=url)
    expect(lock).to_contain_text(re.compile(r"by process [1-9]\d* on \S+ for \d+ s"))
    screenshot(watching, "home-locked")
    feeds.release(FEED)
    expect(watching.locator("#locks li", has_text=url)).to_have_count(0)

    first.reload()
    expect(first.get_by_role("heading", name="Harbour Notes")).to_be_visible()
    screenshot(first, "feeds")
    fetches = feeds.fetches(FEED)
    assert (fetches.started, fetches.completed) == (1, 1)
    assert site.worker.log.count(f"Task feeds.tasks.import_feed[{task_id}] received") == 1
    # Only one import ran. The worker logs its result after the lock is free.
    wait_for(lambda: f"s: '{url}'" in site.worker.log)
    assert site.worker.log.count(f"s: '{url}'") == 1


def click_at_once(*pages: Page) -> None:
    """Press the button on all pages in the same moment, and wait for what comes of it."""
    at = time.time() * 1000 + 500
    for page in pages:
        page.evaluate(
            """([at]) => setTimeout(
                () => document.querySelector("form.inline button").click(), at - Date.now()
            )""",
            [at],
        )
    for page in pages:
        expect(page.get_by_role("status")).to_be_visible()


def test_album_reaches_its_end(page: Page, mail: MailServer, screenshot: Screenshot) -> None:
    """The bar of a new album only grows, up to its end; then its contact sheet is there."""
    page.goto("/albums/")
    page.evaluate("sessionStorage.setItem('percents', '[]')")
    page.add_init_script(NOTE_PERCENTS)
    page.get_by_label("Title").fill("The whole year")
    page.get_by_label("Your e-mail address").fill("pia@example.com")
    # So many that their making is seen on the way.
    page.get_by_label("Pictures").set_input_files(
        [
            FilePayload(name=f"{number}-{name}", mimeType="image/jpeg", buffer=samples.paint(name))
            for number in range(1, 4)
            for name in samples.SCENERIES
        ]
    )
    page.get_by_role("button", name="Make the album").click()
    expect(page.locator("progress[data-all]")).to_be_visible()
    screenshot(page, "album-made")
    expect(page.locator("[data-status]")).to_have_text("Succeeded")
    expect(page.locator("[data-percent]")).to_have_text("100")
    expect(page.get_by_alt_text("All pictures of")).to_have_js_property("complete", True)
    expect(page.get_by_alt_text("All pictures of")).to_have_js_property("naturalWidth", 1380)
    percents = page.evaluate("JSON.parse(sessionStorage.getItem('percents'))")
    assert percents == sorted(percents)
    assert any(0 < percent < 100 for percent in percents), percents
    assert mail.accepted["pia@example.com"] == 1
    screenshot(page, "album-done")


#: Notes what the bar shows, over the reload at its end too.
NOTE_PERCENTS = """
const note = () => {
  const bar = document.querySelector("progress[data-all]");
  if (!bar) return;
  const percents = JSON.parse(sessionStorage.getItem("percents"));
  sessionStorage.setItem("percents", JSON.stringify([...percents, bar.value]));
};
document.addEventListener("DOMContentLoaded", () => {
  note();
  new MutationObserver(note).observe(document, {attributes: true, subtree: true});
});
"""
