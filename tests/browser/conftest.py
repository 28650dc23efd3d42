"""
Fixtures: the site with real servers around it, and pages that may do nothing wrong.

Without Chromium these tests are skipped, with one loud line; under ``CI=true`` they
fail. ``SAFE_TEST_SCREENSHOTS=folder`` keeps the screenshots.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.conftest import leave_out
from tests.example.site import EXAMPLE, Site, running_site
from tests.servers import ProgramNotFound, RedisServer
from tests.servers.programs import find_programs_folder

# The site's own mail server, behind all that is ours.
sys.path.append(str(EXAMPLE))
from demo.mail_server import MailServer

#: Longest wait for something to be seen on a page, ms: a worker may have to find its
#: broker again.
PATIENCE = 30_000
#: Width and height of the screenshots, pixels.
SCREENS = {"phone": (390, 844), "desktop": (1280, 800)}
#: Takes pictures of a whole page, wide and as on a phone, light and dark, under a name.
Screenshot: TypeAlias = Callable[[Page, str], None]

expect.set_options(timeout=PATIENCE)


# For one module: while Playwright is there, its event loop runs in this thread, in which
# Django then refuses the database. The site has processes of its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """The system's Chromium, without a window."""
    try:
        program = find_programs_folder("chromium") / "chromium"
    except ProgramNotFound:
        leave_out("chromium is not on the PATH")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def mail() -> Iterator[MailServer]:
    """The mail server."""
    with MailServer() as server:
        yield server


@pytest.fixture(scope="module")
def site(
    browser: Browser, mail: MailServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """The example site and its worker, with a Redis that no other test empties."""
    with (
        RedisServer() as server,
        running_site(
            tmp_path_factory.mktemp("site"),
            CELERY_BROKER_URL=server.database_url(1),
            REDIS_URL=server.url,
            EMAIL_HOST="127.0.0.1",
            EMAIL_PORT=str(mail.port),
        ) as site,
    ):
        yield site


@pytest.fixture
def expected() -> list[str]:
    """Texts of the errors that the test expects on its pages."""
    return []


@pytest.fixture
def page(browser: Browser, site: Site, expected: list[str]) -> Iterator[Page]:
    """A page of the site: an error in a script or on the console, as of the policy, is a fault."""
    context = browser.new_context(base_url=site.url, locale="en-GB", timezone_id="UTC")
    context.set_default_timeout(PATIENCE)
    errors: list[str] = []
    context.on("weberror", lambda error: errors.append(f"error: {error.error}"))
    context.on("console", lambda line: errors.append(f"{line.type}: {line.text}"))
    yield context.new_page()
    context.close()
    errors = [text for text in errors if text.startswith(("error", "warning"))]
    assert [text for text in errors if not any(each in text for each in expected)] == []


@pytest.fixture(scope="module")
def screenshot(tmp_path_factory: pytest.TempPathFactory) -> Screenshot:
    """Take pictures of pages, for people to look at; no page is wider than its screen."""
    kept = os.environ.get("SAFE_TEST_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")

    def take(page: Page, name: str) -> None:
        for screen, (width, height) in SCREENS.items():
            page.set_viewport_size({"width": width, "height": height})
            assert page.evaluate("document.documentElement.scrollWidth") == width, name
            for scheme in ("dark", "light"):
                page.emulate_media(color_scheme=scheme)
                path = folder / f"{name}-{screen}-{scheme}.png"
                # "initial": to hide the caret Playwright would add a style to the page.
                page.screenshot(path=path, full_page=True, animations="disabled", caret="initial")

    return take
