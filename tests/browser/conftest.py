"""
Fixtures: the site with real servers around it, and pages that may do nothing wrong.

Without Chromium these tests are skipped, with one loud line; under ``CI=true`` they
fail. ``SAFE_TEST_SCREENSHOTS=folder`` keeps the screenshots.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.browser.pages import Troubles
from tests.conftest import NOT_RUN
from tests.example.site import EXAMPLE, Site, running_site
from tests.servers import ProgramNotFound, RedisServer
from tests.servers.programs import find_programs_folder

# The site's own mail server, behind all that is ours.
sys.path.append(str(EXAMPLE))
from demo.mail_server import MailServer

#: Longest wait for something to be seen on a page, ms: a worker may have to find its
#: broker again.
PATIENCE = 30_000
#: Names of the browser's program.
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
#: Width and height of the screenshots, pixels.
SCREENS = {"desktop": (1280, 800), "phone": (390, 844)}

expect.set_options(timeout=PATIENCE)


@pytest.fixture(scope="session")
def chromium() -> Path:
    """The browser's program; without it tests are skipped, under CI they fail."""
    for name in CHROMIUM:
        with suppress(ProgramNotFound):
            return find_programs_folder(name) / name
    reason = f"{NOT_RUN}chromium ({' or '.join(CHROMIUM)} is not on the PATH)"
    if os.environ.get("CI", "").lower() in {"1", "true"}:
        pytest.fail(f"{reason}, and CI must run everything.")
    pytest.skip(reason)


# For one module: while Playwright is there, its event loop runs in this thread, in which
# Django then refuses the database. The site has processes of its own.
@pytest.fixture(scope="module")
def browser(chromium: Path) -> Iterator[Browser]:
    """The system's Chromium, without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def mail() -> Iterator[MailServer]:
    """The mail server."""
    with MailServer() as server:
        yield server


@pytest.fixture(scope="session")
def site(
    chromium: Path,
    redis_server: RedisServer,
    mail: MailServer,
    tmp_path_factory: pytest.TempPathFactory,
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
def troubles() -> Iterator[Troubles]:
    """The errors on the test's pages; an unexpected one fails the test at its end."""
    troubles = Troubles()
    yield troubles
    assert troubles.unexpected == []


@pytest.fixture
def new_page(browser: Browser, site: Site, troubles: Troubles) -> Iterator[Callable[[], Page]]:
    """Open pages of the site, each that of another visitor."""
    contexts = []

    def make() -> Page:
        context = browser.new_context(base_url=site.url, locale="en-GB", timezone_id="UTC")
        contexts.append(context)
        context.set_default_timeout(PATIENCE)
        troubles.watch(context)
        return context.new_page()

    yield make
    for context in contexts:
        context.close()


@pytest.fixture
def page(new_page: Callable[[], Page]) -> Page:
    """A page of the site."""
    return new_page()


class Screenshot(Protocol):
    """Takes pictures of a whole page."""

    def __call__(self, page: Page, name: str) -> None:
        """
        Take four: wide and as on a phone, light and dark.

        Args:
            name: What their files' names begin with.
        """


@pytest.fixture(scope="session")
def screenshot(tmp_path_factory: pytest.TempPathFactory) -> Screenshot:
    """Take pictures of pages, for people to look at."""
    kept = os.environ.get("SAFE_TEST_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")

    def take(page: Page, name: str) -> None:
        before = page.viewport_size
        for screen, (width, height) in SCREENS.items():
            page.set_viewport_size({"width": width, "height": height})
            for scheme in ("dark", "light"):
                page.emulate_media(color_scheme=scheme)
                path = folder / f"{name}-{screen}-{scheme}.png"
                # "initial": to hide the caret Playwright would add a style to the page.
                page.screenshot(path=path, full_page=True, animations="disabled", caret="initial")
        if before is not None:
            page.set_viewport_size(before)

    return take
