"""The users that log in to the admin."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from playwright.sync_api import Page, expect

from tests.example.site import Site


class Staff(NamedTuple):
    """Somebody who may log in to the admin."""

    name: str
    password: str


def make_staff(site: Site, *permissions: str, is_superuser: bool = False) -> Staff:
    """
    Make somebody who may log in to the admin.

    Args:
        permissions: What they may do there, such as ``feeds.view_feed``.
        is_superuser: Whether they may do everything.
    """
    staff = Staff(f"staff-{uuid.uuid4().hex[:8]}", uuid.uuid4().hex)
    site.execute(f"""
        from django.contrib.auth.models import Permission
        from accounts.models import User
        user = User.objects.create_user(
            {staff.name!r}, password={staff.password!r},
            is_staff=True, is_superuser={is_superuser},
        )
        for permission in {permissions!r}:
            app, _, codename = permission.partition(".")
            found = Permission.objects.get(content_type__app_label=app, codename=codename)
            user.user_permissions.add(found)
    """)
    return staff


def login(page: Page, staff: Staff) -> None:
    """Log in, and go to the admin's start page."""
    page.goto("/admin/login/?next=/admin/")
    page.get_by_label("Username").fill(staff.name)
    page.get_by_label("Password").fill(staff.password)
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("#user-tools")).to_contain_text(staff.name)
