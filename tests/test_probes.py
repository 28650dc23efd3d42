"""The age of the last relay, and the file that a relay touches, as probes ask for them."""

import os
from pathlib import Path

from celery import Celery
from pytest_django import Settings

from django_celery_safe.management.heartbeat import HeartbeatFile
from django_celery_safe.sending.relay import Relay
from tests.processes import wait_for
from tests.test_outbox_command import (
    NOBODY,
    PATIENCE,
    _outboxes_of_this_test,
    alias,
    ids,
    leave,
    other,
    refused,
    relaying,
)

__all__ = ["_outboxes_of_this_test", "alias", "other"]

#: A moment long ago, s since the epoch.
LONG_AGO = 1_000_000_000


def age_of(path: Path) -> float:
    """Return when a file was touched last, s since the epoch."""
    return path.stat().st_mtime


def make_old(path: Path) -> None:
    """Let a file have been touched long ago."""
    os.utime(path, (LONG_AGO, LONG_AGO))


def test_the_file_is_touched_when_every_relay_took_a_turn(
    alias: str, other: str, tmp_path: Path
) -> None:
    """A relay that hangs lets the file grow old, however busy the others are."""
    path = tmp_path / "relay"
    relays = [Relay(alias), Relay(other)]
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
        for folder_is_gone in (False, True):
            path.unlink()
            if folder_is_gone:
                path.parent.rmdir()
            relay.turns += 1
            touch()
            assert path.exists() is not folder_is_gone


def test_a_file_that_can_not_be_written(alias: str, tmp_path: Path) -> None:
    """The relay does not begin, and says why; nor does it with --once, which needs no probe."""
    _, why = refused("relay", "--heartbeat-file", str(tmp_path / "none" / "relay"))
    assert why.startswith("--heartbeat-file can't be written: ")
    _, why = refused("relay", "--once", "--heartbeat-file", str(tmp_path / "relay"))
    assert "not allowed with argument" in why


def test_a_relay_that_waits_touches_its_file(
    alias: str, broker: Celery, settings: Settings, tmp_path: Path
) -> None:
    """Also without a broker; a signal that ends the relay removes the file, and leaves all rows."""
    row = leave(alias)
    settings.CELERY_BROKER_URL = NOBODY
    path = tmp_path / "heartbeat"
    with relaying(tmp_path, "--heartbeat-file", str(path)) as relay:
        wait_for(path.exists, PATIENCE, "no file was made")
        wait_for(lambda: "The broker can't be reached" in relay.log, PATIENCE)
        make_old(path)
        wait_for(lambda: age_of(path) > LONG_AGO, PATIENCE, "the file was not touched")
        assert relay.end() == 0
    assert not path.exists()
    assert relay.log.endswith("Sent 0 message(s).\n")
    assert "password" not in relay.log
    assert ids(alias) == {row.pk}
