"""The pages of locks, on every store, with any names."""

import time
from pathlib import Path
from typing import Final

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.urls import reverse
from pytest_django import Settings

from django_celery_safe import find_lock
from django_celery_safe.models import Lock
from django_celery_safe.texts import printable
from tests.admin.pages import Visitor, every_page
from tests.admin.rows import HOLDER, hold
from tests.admin.urls import LOCKS
from tests.servers import RedisServer

#: Names that something might not take: HTML, terminals, databases, URLs, keys.
NAMES: Final = (
    "\"'><script>alert(1)</script><img src=x onerror=alert(1)>",
    "a\x00b\x1b[31m\r\n\x7f",
    "feed\u202egpj.exe\u2066",
    "mail:\ud800",
    "x" * 5000,
    "\N{PILE OF POO}é漢" * 60,
    "https://example.com/a%20b/?q=1&r=%2F#top",
    "/a//b/../_2F_/",
    " {{ name }}{% url 'x' %}  ",
    '["\\"]',
)


def key_of(name: str) -> str:
    """Return what a page shows of a name, with single spaces as browsers show it."""
    return " ".join(printable(name).split())


@pytest.fixture(params=["redis", "database", "local"])
def store(request: pytest.FixtureRequest, settings: Settings, root: Visitor) -> Visitor:
    """A superuser, with the locks in each store in turn."""
    if request.param == "redis":
        settings.CACHES = request.getfixturevalue("redis_cache_settings")()
    elif request.param == "database":
        settings.DJANGO_CELERY_SAFE = {"LOCK_DATABASE": "site"}
    return root


def test_a_lock_of_a_task(store: Visitor) -> None:
    """The list and the page show who holds a lock, for how long, in which task."""
    page = store.get(LOCKS)
    assert (page.status, page.rows, page.error) == (200, [], "")
    assert "0 locks" in page.content
    hold("feed:1", HOLDER._replace(since=time.time() - 300))
    (row,) = store.get(LOCKS).rows
    assert row.pop("Holder").startswith("Its holder renewed it ")
    assert row.pop("") == ""
    assert row == {
        "Lock": "feed:1",
        "Process": "web1 pid 42",
        "Held for": "5min",
        "Lease left": "10min",
        "Task": "shop.tasks.sell",
        "Arguments": "(7,)",
    }
    assert store.open(Lock(name="feed:1")).fields["Task id"] == "id-1"
    assert store.open(Lock(name="free")).fields["Holder"] == "Nobody holds this lock now."


def test_markers(root: Visitor) -> None:
    """Markers of copies are not listed; messages that hold a lock are."""
    message = HOLDER._replace(host="", pid=0, renewed=False)
    task = message.task
    for name in (f"{task}:ended:{'0' * 32}", f"sent:{task}:7"):
        hold(name, message)
    shown = {row["Lock"]: row["Holder"] for row in root.get(LOCKS).rows}
    assert list(shown) == [f"sent:{task}:7"]
    assert "A message holds it" in shown[f"sent:{task}:7"]


@pytest.mark.parametrize("store", ["redis", "database"], indirect=True)
def test_names(store: Visitor) -> None:
    """A lock of any name is listed, released and logged, and its name steers nothing."""
    for name in NAMES:
        hold(name, HOLDER._replace(task=name, arguments=name, host=name))
        page = store.get(LOCKS)
        (row,) = page.rows
        assert row["Lock"] == key_of(name)
        assert page.find_inline() == []
        links = [LOCKS + link for link in page.values("#result_list .field-link a", "href")]
        assert links == ([LOCKS + quote(name) + "/change/"] if name.isprintable() else [])
        for link in links:
            shown = store.get(link)
            assert (shown.status, shown.error, shown.find_inline()) == (200, "", [])
            assert shown.fields["Lock"] == key_of(name)
            asked = store.take(shown.values(".safe-action", "action")[0], "release", name)
            assert asked.selections == [name]
        asked = store.take(LOCKS, "release", *page.selections)
        assert key_of(name) in asked.content
        assert asked.find_inline() == []
        store.confirm(LOCKS, "release", *asked.selections)
        assert find_lock(name) is None
        assert LogEntry.objects.latest("pk").object_id == printable(name)
        for link in links:
            assert "Released: " in store.get(link.replace("/change/", "/history/")).content
        page = store.get(LOCKS, q=name.encode("utf-8", "replace").decode())
        assert (page.rows, page.find_inline()) == ([], [])


def test_whole_name_where_nothing_is_listed(
    root: Visitor, settings: Settings, tmp_path: Path
) -> None:
    """Where the store can't list, the page says so, and a whole name finds its lock."""
    settings.CACHES = {"default": {"BACKEND": "diskcache.DjangoCache", "LOCATION": str(tmp_path)}}
    hold("feed:1")
    page = root.get(LOCKS)
    assert (page.status, page.rows) == (200, [])
    assert "can't list its locks" in page.error
    assert "0 locks" not in page.content
    assert root.get(LOCKS, q="feed:1").rows[0]["Lock"] == "feed:1"
    (action,) = root.open(Lock(name="feed:1")).values(".safe-action", "action")
    assert root.confirm(action, "release", "feed:1").messages == ["Released: 1 lock."]
    assert root.get(LOCKS, q="feed:1").rows == []


def test_store_down(root: Visitor, fragile_redis: RedisServer) -> None:
    """A store that does not answer is told as that, by status 503, and never as "no lock"."""
    hold("feed")
    fragile_redis.stop()
    pages = [root.get(LOCKS), root.get(LOCKS, q="x"), root.open(Lock(name="feed"))]
    pages.append(root.confirm(LOCKS, "release", "feed"))
    for page in pages:
        assert (page.status, page.decisions) == (503, [])
        assert "did not answer" in page.error or "default" in page.error
        assert "0 locks" not in page.content
    assert LogEntry.objects.count() == 0
    for url in (reverse("admin:index"), every_page(Lock, "feed")["history"]):
        assert root.get(url).status == 200
