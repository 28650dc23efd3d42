"""
Fixtures of the admin: one database with everything in it, who logs in, and what they see.

Commits are commits there, as they are in a project.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from django_celery_safe.locks.stores import local
from tests.admin.pages import Visitor
from tests.conftest import MakeDatabase
from tests.routing import AllIn, routed_by
from tests.servers.databases import DatabaseKind


def serve_from(alias: str) -> Iterator[str]:
    """Let everything be in this database."""
    with routed_by(AllIn(alias)):
        yield alias


@pytest.fixture
def site(db_kind: DatabaseKind, make_database: MakeDatabase) -> Iterator[str]:
    """The database of the whole site, of the kind that this run is about."""
    yield from serve_from(make_database(db_kind, "site"))


@pytest.fixture(autouse=True)
def _locks_in_memory() -> None:
    """Begin without locks, wherever a test does not say where they live."""
    local.clear()


@pytest.fixture(autouse=True)
def _fast_passwords(settings: Settings) -> None:
    """Spend no time on passwords, which nobody uses here."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


def make_visitor(*permissions: str, csrf: bool = False, **attributes: Any) -> Visitor:
    """
    Log somebody in.

    Args:
        permissions: Codenames, such as ``release_lock``.
        csrf: Whether forms without a token are refused, as they are in a browser.
        attributes: Of the user; without any it is staff.
    """
    users: Any = get_user_model()
    given = {"is_staff": True, **attributes}
    user = users._default_manager.create(username=f"user-{users._default_manager.count()}", **given)
    found = Permission.objects.filter(codename__in=permissions)
    assert found.count() == len(permissions)
    user.user_permissions.set(found)
    client = Client(enforce_csrf_checks=csrf)
    client.force_login(user)
    return Visitor(client, user)


@pytest.fixture
def root(site: str) -> Visitor:
    """Somebody who may do everything."""
    return make_visitor(is_superuser=True)


def every_page(model: Any, pk: Any) -> dict[str, str]:
    """Return the URLs of all pages about a row, by name."""
    name = f"admin:django_celery_safe_{model._meta.model_name}"
    return {
        "list": reverse(f"{name}_changelist"),
        "change": reverse(f"{name}_change", args=[quote(pk)]),
        "history": reverse(f"{name}_history", args=[quote(pk)]),
    }
