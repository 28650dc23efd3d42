"""The start page: locks, messages and runs, also when they can't be read."""

import re
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from playwright.sync_api import Page, Request, expect

from demo.mail_server import MailServer
from tests.browser.conftest import Screenshot
from tests.browser.pages import Troubles
from tests.browser.test_stories import sign_up
from tests.example.site import Site
from tests.processes import wait_for
from tests.servers import RedisServer

pytestmark = pytest.mark.nightly


def test_message_waits_while_the_broker_is_down(
    new_page: Callable[[], Page],
    site: Site,
    broker: RedisServer,
    mail: MailServer,
    screenshot: Screenshot,
) -> None:
    """A message that no broker took is shown until a relay has sent it, and is not lost."""
    watching, visiting = new_page(), new_page()
    watching.goto("/")
    row = watching.locator("#messages li")
    expect(row).to_have_count(0)
    broker.stop()
    try:
        sign_up(visiting, "olaf")
        expect(row).to_contain_text("accounts.tasks.send_welcome_email")
        screenshot(watching, "home-broker-down")
    finally:
        broker.start()
    assert mail.accepted["olaf@example.com"] == 0
    with site.relay():
        expect(row).to_have_count(0)
        wait_for(lambda: mail.accepted["olaf@example.com"] == 1, 40)


def test_locks_that_are_not_known_are_not_none(
    page: Page, lock_server: RedisServer, screenshot: Screenshot
) -> None:
    """While the locks' server is away the page says so; the rest of it stays."""
    page.goto("/")
    expect(page.locator("#locks")).to_contain_text("None.")
    lock_server.stop()
    try:
        expect(page.locator("#locks")).to_contain_text("Not known.")
        expect(page.locator("#locks")).not_to_contain_text("None.")
        expect(page.locator("#runs .unknown")).to_have_count(0)
        screenshot(page, "home-locks-unknown")
    finally:
        lock_server.start()
    expect(page.locator("#locks")).to_contain_text("None.")


def test_site_that_does_not_answer_is_told(
    page: Page, site: Site, troubles: Troubles, screenshot: Screenshot
) -> None:
    """The page says that its data is old while the site is away, and then goes on by itself."""
    page.goto("/")
    freshness = page.locator("[data-freshness]")
    expect(freshness).to_have_text("Live, every second")
    troubles.allow("net::ERR_")
    site.web.kill()
    try:
        expect(freshness).to_contain_text("The site does not answer: this is how it was at")
        screenshot(page, "home-stale")
    finally:
        site.web.start()
    site.wait_until_it_answers()
    expect(freshness).to_have_text("Live, every second")


def test_hidden_page_asks_nothing(page: Page) -> None:
    """A page in a hidden tab lets the site rest, and looks at once when it is seen again."""
    asked: list[str] = []

    def note(request: Request) -> None:
        if request.url.endswith("/activity/"):
            asked.append(request.url)

    page.clock.install()
    page.goto("/")
    expect(page.locator("[data-freshness]")).to_have_text("Live, every second")
    set_hidden(page, True)
    page.on("request", note)
    # From here on, the page's time passes only when the test calls run_for().
    page.clock.pause_at(datetime.now() + timedelta(minutes=1))
    page.clock.run_for(60_000)
    assert asked == []
    set_hidden(page, False)
    wait_for(lambda: page.evaluate("1") and len(asked) == 1)
    # The page plans its next request when it has the answer to the last one.
    wait_for(lambda: page.clock.run_for(1_000) or len(asked) > 1)


def set_hidden(page: Page, hidden: bool) -> None:
    """Let the browser say that the tab is hidden, or that it is not."""
    page.evaluate(
        """(hidden) => {
            Object.defineProperty(document, "hidden", {get: () => hidden, configurable: true});
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        hidden,
    )


def test_buttons_of_the_start_page(page: Page, screenshot: Screenshot) -> None:
    """The page shows the work that was started from it, running and ended."""
    page.goto("/")
    page.get_by_role("button", name="Import a slow feed").click()
    expect(page.locator("#locks li", has_text="slow-trains.atom")).to_have_count(2)
    page.get_by_role("button", name="Make an album").click()
    run = page.locator("#runs li", has_text="From dark to light").first
    expect(run).to_contain_text(re.compile(r"\d+ of 19 steps, in stage [1-4] of 4"))
    screenshot(page, "home-busy")
    expect(run).to_contain_text("19 of 19 steps, ended")
    expect(page.locator("#locks li", has_text="slow-trains.atom")).to_have_count(0)
    screenshot(page, "home")
