"""Every page of the site: it fits on a phone, and keeps to its policy."""

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import SCREENS, Screenshot
from tests.browser.staff import login, make_staff
from tests.example.site import Site

pytestmark = pytest.mark.nightly

PUBLIC = {"home": "/", "sign-up": "/accounts/sign-up/", "feeds": "/feeds/", "albums": "/albums/"}


@pytest.mark.parametrize("name", PUBLIC)
def test_page_fits_on_a_phone(page: Page, name: str, screenshot: Screenshot) -> None:
    """No page has to be scrolled sideways."""
    width, height = SCREENS["phone"]
    page.set_viewport_size({"width": width, "height": height})
    page.goto(PUBLIC[name])
    assert page.evaluate("document.documentElement.scrollWidth") == width
    screenshot(page, f"page-{name}")


def test_refused_sign_up_says_why(page: Page, screenshot: Screenshot) -> None:
    """A form that was not filled in says so beside its fields."""
    page.goto("/accounts/sign-up/")
    page.get_by_role("button", name="Create my account").click()
    expect(page.get_by_text("This field is required.")).to_have_count(4)
    screenshot(page, "sign-up-refused")


def test_admin_works_under_the_policy(page: Page, site: Site, screenshot: Screenshot) -> None:
    """Django's admin, its scripts included, needs nothing that the policy forbids."""
    login(page, make_staff(site, is_superuser=True))
    screenshot(page, "admin")
    page.goto("/admin/feeds/entry/add/")
    page.get_by_role("link", name="Today").click()
    expect(page.locator("#id_published_at_0")).to_have_value(
        page.evaluate("new Date().toISOString().slice(0, 10)")
    )
    page.goto("/admin/accounts/user/")
    page.locator("#action-toggle").check()
    expect(page.locator(".action-counter")).to_contain_text("selected")


def test_staff_see_what_they_may(page: Page, site: Site) -> None:
    """Somebody with one permission finds one page in the admin."""
    login(page, make_staff(site, "feeds.view_feed"))
    expect(page.locator("#content-main th[scope=row] a")).to_have_text(["Feeds"])
