"""Locks by each client of Redis: Django's RedisCache alone, and django-redis."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import caches
from pytest_django import Settings

from django_celery_safe import cache_lock
from tests.caches import cache_at
from tests.commands import run_python
from tests.docs.pages import page
from tests.processes.settings import settings_environment
from tests.processes.worker import ROOT
from tests.servers import RedisServer

#: A program that imports every module of the package, and uses a lock.
USES = """
import django
django.setup()

from importlib import import_module

from django_celery_safe import cache_lock, find_lock
from tests.modules import find_modules

for name in find_modules():
    import_module(name)

with cache_lock("feed:42") as lock:
    lock.ensure()
    assert not cache_lock("feed:42").acquire()
assert find_lock("feed:42") is None
print("done")
"""

#: The clients in the order in which the docs show them.
CLIENTS = ["django-redis", "django"]


def test_locks_without_django_redis(
    redis_server: RedisServer, settings: Settings, tmp_path: Path
) -> None:
    """With redis alone every module can be imported, and locks work."""
    redis_server.flush()
    settings.CACHES = {
        **cache_at(redis_server.database_url(0), "django"),
        **cache_at(redis_server.database_url(3), "django", "locks"),
    }
    settings.DJANGO_CELERY_SAFE = {"LOCK_CACHE": "locks"}
    for name in ("django_redis", "hiredis"):
        text = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
        (tmp_path / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, **settings_environment(), "PYTHONPATH": path}
    assert run_python("-W", "error", "-c", USES, env=environment) == "done\n"


@pytest.mark.repository
@pytest.mark.parametrize("kind", CLIENTS)
def test_the_settings_of_the_docs(kind: str, redis_server: RedisServer, settings: Settings) -> None:
    """Each client takes the settings that the docs show, and they mean the same to both."""
    redis_server.flush()
    shown = page("docs/how-to/choose-where-locks-live.md").section("Put them in Redis")
    blocks = re.findall(r"```python\n(CACHES.*?)```", shown, re.DOTALL)
    exec(blocks[CLIENTS.index(kind)], names := {"CACHES": dict[str, Any]()})
    cache = names["CACHES"]["locks"]
    url = cache["LOCATION"].replace("127.0.0.1:6379", f"127.0.0.1:{redis_server.port}")
    named: dict[str, Any] = {"client_name": "shop"}
    named = {"CONNECTION_POOL_KWARGS": named} if kind == "django-redis" else named
    options = {**cache["OPTIONS"], **named}
    settings.CACHES = {"default": {**cache, "LOCATION": url, "OPTIONS": options}}
    with cache_lock("feed:42") as lock, redis_server.client(db=1) as admin:
        assert lock
        assert "shop" in {client["name"] for client in admin.client_list()}
    own: Any = caches["default"]
    client = own.client.get_client() if kind == "django-redis" else own._cache.get_client()
    chosen = client.connection_pool.connection_kwargs
    assert (chosen["socket_connect_timeout"], chosen["socket_timeout"]) == (2, 2)
