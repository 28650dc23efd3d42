"""The pages of locks, on every store, with any names."""

import re
import time
from pathlib import Path
from typing import Final

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.db import connections
from django.urls import reverse
from pytest_django import Settings

from django_celery_safe import find_lock
from django_celery_safe.locks.stores import locate
from django_celery_safe.management.console import printable
from django_celery_safe.models import DatabaseLock
from tests.admin.pages import Visitor, count_queries
from tests.admin.rows import HOLDER, hold
from tests.conftest import MakeDatabase, MakeRedisCache
from tests.locks.conftest import fragile_redis
from tests.servers import RedisServer

__all__ = ["fragile_redis"]

LIST: Final = "/admin/django_celery_safe/lock/"
#: Stores that list their locks.
STORES: Final = ("redis", "database", "local")

#: Names that something might not take: HTML, terminals, databases, URLs, keys.
NAMES: Final = {
    "markup": "\"'><script>alert(1)</script><img src=x onerror=alert(1)>",
    "control": "a\x00b\x1b[31m\r\n\x7f",
    "bidi": "feed\u202egpj.exe\u2066",
    "half": "mail:\ud800",
    "long": "x" * 5000,
    "wide": "\N{PILE OF POO}é漢" * 60,
    "url": "https://example.com/a%20b/?q=1&r=%2F#top",
    "slashes": "/a//b/../_2F_/",
    "page": "x/history",
    "template": " {{ name }}{% url 'x' %}  ",
    "json": '["\\"]',
}


def change_url(name: str) -> str:
    """Return the URL of a lock's page."""
    return reverse("admin:django_celery_safe_lock_change", args=[quote(name)])


def key_of(name: str) -> str:
    """Return what a page shows of a name, with single spaces as browsers show it."""
    return " ".join(printable(name).split())


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, settings: Settings, root: Visitor) -> Visitor:
    """A superuser, with the locks in each store in turn."""
    if request.param == "redis":
        make_cache: MakeRedisCache = request.getfixturevalue("redis_cache_settings")
        settings.CACHES = make_cache("django-redis")
    elif request.param == "database":
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "site"}
    return root


@pytest.fixture
def unlisted(root: Visitor, settings: Settings, tmp_path: Path) -> Visitor:
    """A superuser, with the locks in a cache that can't list them."""
    settings.CACHES = {"default": {"BACKEND": "diskcache.DjangoCache", "LOCATION": str(tmp_path)}}
    return root


# Contents


def test_a_lock_of_a_task(store: Visitor) -> None:
    """The list and the page show who holds a lock, for how long, in which task."""
    page = store.get(LIST)
    assert (page.status, page.rows, page.decisions, page.error) == (200, [], [], "")
    assert "No lock is held." in page.content
    assert locate().store().where in page.content
    hold("feed:1", HOLDER._replace(since=time.time() - 7))
    (row,) = store.get(LIST).rows
    assert row.pop("").strip() == ""
    held = find_lock("feed:1")
    assert held is not None
    assert row.pop("Fence", None) == (None if held.fence is None else str(held.fence))
    age = row.pop("Held for")
    assert 7 <= float(age.rstrip("s")) < 67
    assert row == {
        "Lock": "feed:1",
        "Lease left": "10min",
        "Renewed": "yes",
        "Kind": "run",
        "Process": "pid 42 on web1",
        "Task": "shop.tasks.sell (7,) id-1",
    }
    fields = store.get(change_url("feed:1")).fields
    assert fields["Held since"].endswith("s ago")
    assert fields["Holder"].startswith("lives, or died in the last ")
    assert (fields["Task"], fields["Arguments"]) == ("shop.tasks.sell", "(7,)")


# Names


@pytest.mark.parametrize("store", ["redis", "database"], indirect=True)
def test_names(store: Visitor) -> None:
    """A lock of any name is listed, shown, released and logged, and its name steers nothing."""
    for name in NAMES.values():
        hold(name, HOLDER._replace(renewed=False, task=name, arguments=name, host=name))
        page = store.get(LIST)
        (row,) = page.rows
        assert row["Lock"] == key_of(name)
        assert page.find_inline() == []
        assert name == printable(name) or name not in page.html
        links = [link for link in page.links if link.endswith("/change/") and "/lock/" in link]
        assert len(links) == (1 if name == printable(name) else 0)
        for link in links:
            shown = store.get(link)
            assert (shown.status, shown.error) == (200, "")
            assert shown.selections == page.selections
            assert shown.find_inline() == []
            assert key_of(name) in shown.fields["Task"]
        asked = store.take(LIST, "release", *page.selections)
        assert key_of(name) in asked.content
        assert asked.find_inline() == []
        told = store.confirm(LIST, "release", *asked.selections)
        assert told.messages == ["1 lock was released."]
        assert find_lock(name) is None
        assert LogEntry.objects.latest("pk").object_id == printable(name)
        for link in links:
            history = store.get(link.replace("/change/", "/history/"))
            assert "Was released: held by pid 42" in history.content
        given = name.encode("utf-8", "replace").decode()
        page = store.get(LIST, q=given, task=given)
        assert page.find_inline() == []
        assert "No lock like that is held." in page.content
    assert store.get(reverse("admin:index")).status == 200


# Lists


def test_filters(root: Visitor) -> None:
    """The list is narrowed by the beginning of names, by a task's whole name, and by both."""
    for number in range(3):
        hold(f"feed:{number}", HOLDER._replace(task=f"shop.tasks.t{number}"))
    hold("mail:1")

    def names(**query: str) -> list[str]:
        return sorted(row["Lock"] for row in root.get(LIST, **query).rows)

    assert names(q="feed:") == ["feed:0", "feed:1", "feed:2"]
    assert names(task="shop.tasks.sell") == ["mail:1"]
    assert names(task="shop.tasks") == names(q="ail") == []
    assert names(q="feed:", task="shop.tasks.t2") == ["feed:2"]
    for odd in ("0", "-1", "x", "", "²", "٣", "9" * 30, "9" * 9999):
        assert root.get(LIST, p=odd).status == 200


def test_paging(store: Visitor) -> None:
    """Each of 250 locks is on one of three pages; many locks need no query more than one."""
    hold("feed:0")
    of_one = count_queries(lambda: store.get(LIST))
    for number in range(1, 250):
        hold(f"feed:{number}")
    assert count_queries(lambda: store.get(LIST)) == of_one <= 5
    hold("mail")
    url, seen, sizes = f"{LIST}?q=feed%3A", [], []
    while len(sizes) < 5:
        page = store.get(url)
        sizes.append(len(page.rows))
        seen += [row["Lock"] for row in page.rows]
        onward = [link for link in page.links if f"p={len(sizes) + 1}" in link]
        if not onward:
            break
        url = LIST + onward[0]
    assert sizes == [100, 100, 50]
    assert sorted(seen) == sorted(f"feed:{number}" for number in range(250))
    assert "There are no more." in store.get(LIST, p="9").content


# Stores that do not answer, or not this


def test_whole_name_where_nothing_is_listed(unlisted: Visitor) -> None:
    """Where the store can't list, the page says so, and a whole name finds its lock."""
    token = hold("feed:1", HOLDER._replace(renewed=False))
    for page in (unlisted.get(LIST), unlisted.get(LIST, task="shop.tasks.sell")):
        assert (page.status, page.rows) == (200, [])
        assert "can't list its locks" in page.error
        assert "No lock" not in page.content
    found = unlisted.get(LIST, q="feed:1")
    assert [row["Lock"] for row in found.rows] == ["feed:1"]
    assert found.selections == [f'{token}"feed:1"']
    assert "No lock like that is held." in unlisted.get(LIST, q="feed:").content
    told = unlisted.confirm(LIST, "release", *found.selections)
    assert "1 lock was released." in told.messages


def test_store_down(root: Visitor, fragile_redis: RedisServer) -> None:
    """A store that does not answer is told as that, by status 503, and never as "no lock"."""
    hold("feed", HOLDER._replace(renewed=False))
    selection = root.get(LIST).selections
    fragile_redis.stop()
    for page in (root.get(LIST), root.get(LIST, q="x"), root.get(change_url("feed"))):
        assert (page.status, page.decisions) == (503, [])
        assert "did not answer" in page.error or "default" in page.error
        assert not re.search("No lock|Nobody", page.content)
    (told,) = root.confirm(LIST, "release", *selection).messages
    assert "released" not in told
    assert LogEntry.objects.count() == 0
    for url in (reverse("admin:index"), change_url("feed").replace("change", "history")):
        assert root.get(url).status == 200


def test_where_no_lock_can_be(
    root: Visitor, settings: Settings, make_database: MakeDatabase
) -> None:
    """Where no lock can live, the pages say what is wrong, and what to do."""
    assert "of this process alone" in root.get(LIST).content
    alias = make_database("sqlite-immediate", "bare")
    with connections[alias].schema_editor() as editor:
        editor.delete_model(DatabaseLock)
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.dummy.DummyCache"}}
    for chosen, said in [
        ({}, "Use Redis"),
        ({"LOCK_CACHE": "nowhere"}, "'nowhere'"),
        ({"LOCK_DATABASE": alias}, "migrate"),
    ]:
        settings.DJANGO_CELERY_SAFE = chosen
        for page in (root.get(LIST), root.get(change_url("feed"))):
            assert said in page.error
            assert not re.search("No lock|Nobody", page.content)
