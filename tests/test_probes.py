"""The age of the last relay, and the file that a relay touches, as probes ask for them."""

import os
from datetime import timedelta
from pathlib import Path

import pytest
from celery import Celery
from django.core.management import CommandError
from pytest_django import Settings

from django_celery_safe.databases import Now
from django_celery_safe.management.heartbeat import HeartbeatFile
from django_celery_safe.models import OutboxRelay
from django_celery_safe.sending.relay import Relay
from tests.conftest import MakeDatabase
from tests.processes import wait_for
from tests.test_outbox_command import (
    NOBODY,
    NotInDefault,
    alias,
    leave,
    refused,
    relaying,
    run,
    status_of_program,
)

__all__ = ["NotInDefault", "alias"]

#: A moment long ago, s since the epoch.
LONG_AGO = 1_000_000_000


@pytest.fixture(autouse=True)
def _outboxes_of_this_test(settings: Settings) -> None:
    """Let only the databases that the test makes have an outbox, in its processes too."""
    settings.DATABASE_ROUTERS = ["tests.test_outbox_command.NotInDefault"]


def be_seen(alias: str, ago: float) -> None:
    """Let a relay have been seen so many seconds ago."""
    seen_at = Now() - timedelta(seconds=ago)
    OutboxRelay.objects.using(alias).bulk_create(
        [OutboxRelay(pk=1, host="web1", pid=7, seen_at=seen_at)]
    )


@pytest.mark.parametrize(
    ("seen", "limit", "status"), [(10, "5m", 0), (600, "5m", 1), (None, "365d", 1)]
)
def test_the_age_of_the_relay_decides_the_exit_status(
    alias: str, broker: Celery, seen: float | None, limit: str, status: int
) -> None:
    """status --max-relay-age exits with 1 if no relay was seen for longer, or ever."""
    if seen is not None:
        be_seen(alias, seen)
    assert status_of_program("status", "--max-relay-age", limit) == status
    assert status_of_program("status") == 0


def test_every_outbox_needs_a_relay(
    alias: str, make_database: MakeDatabase, broker: Celery
) -> None:
    """--max-relay-age looks at all outboxes, shows the figures first, and names the one."""
    make_database("sqlite-immediate", "other")
    be_seen(alias, 0)
    out, why = refused("status", "--max-relay-age", "60")
    assert out.startswith(("shop\n", "other\n"))
    assert why.startswith("No relay has been seen in 'other' yet; --max-relay-age is 60.")
    assert "a relay was seen" in run("status", "--max-relay-age", "60", "--database", alias)
    be_seen("other", 7200)
    _, why = refused("status", "--max-relay-age", "60")
    assert why.startswith("No relay has been seen in 'other' for 2h; ")


def age_of(path: Path) -> float:
    """Return when a file was touched last, s since the epoch."""
    return path.stat().st_mtime


def make_old(path: Path) -> None:
    """Let a file have been touched long ago."""
    os.utime(path, (LONG_AGO, LONG_AGO))


def test_the_file_is_touched_when_every_relay_took_a_turn(
    alias: str, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """A relay that hangs lets the file grow old, however busy the others are."""
    path = tmp_path / "relay"
    relays = [Relay(alias), Relay(make_database("sqlite-immediate", "other"))]
    with HeartbeatFile(str(path)).kept(relays) as touch:
        assert path.exists()
        make_old(path)
        relays[0].turns += 5
        touch()
        assert age_of(path) == LONG_AGO
        relays[1].turns += 1
        touch()
        assert age_of(path) > LONG_AGO
        make_old(path)
        touch()
        assert age_of(path) == LONG_AGO
    assert not path.exists()


def test_a_file_that_is_taken_away_harms_no_relay(alias: str, tmp_path: Path) -> None:
    """It is made again at the next turn; without its folder the relay goes on without it."""
    path = tmp_path / "probes" / "relay"
    path.parent.mkdir()
    relay = Relay(alias)
    with HeartbeatFile(str(path)).kept([relay]) as touch:
        path.unlink()
        relay.turns += 1
        touch()
        assert path.exists()
        path.unlink()
        path.parent.rmdir()
        relay.turns += 1
        touch()
    assert not path.exists()


def test_a_file_that_can_not_be_written(alias: str, broker: Celery, tmp_path: Path) -> None:
    """The relay does not begin, and says why; nor does it with --once, which needs no probe."""
    _, why = refused("relay", "--heartbeat-file", str(tmp_path / "none" / "relay"))
    assert why.startswith("--heartbeat-file can't be written: ")
    with pytest.raises(CommandError, match="not allowed with argument"):
        run("relay", "--once", "--heartbeat-file", str(tmp_path / "relay"))


@pytest.mark.parametrize("has_broker", [True, False], ids=["broker", "no broker"])
def test_a_relay_touches_its_file(
    alias: str,
    broker: Celery,
    settings: Settings,
    tmp_path: Path,
    has_broker: bool,
) -> None:
    """A relay that waits goes on touching the file; a signal that ends the relay removes it."""
    leave(alias)
    if not has_broker:
        settings.CELERY_BROKER_URL = NOBODY
    path = tmp_path / "heartbeat"
    with relaying(tmp_path, "--heartbeat-file", str(path)) as relay:
        wait_for(path.exists, 30, "no file was made")
        make_old(path)
        wait_for(lambda: age_of(path) > LONG_AGO, 30, "the file was not touched")
        assert relay.end() == 0
    assert not path.exists()
