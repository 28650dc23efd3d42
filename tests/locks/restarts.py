"""A restart of a server that holds its locks in memory alone."""

import logging

import pytest

from django_celery_safe import LockLost, cache_lock
from tests.clock import HeldClock
from tests.processes import wait_for
from tests.servers import Server


def restart_and_lose(
    server: Server, clock: HeldClock, losses: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Restart the server, and assert that ensure() and the renewing thread notice the loss."""
    with (
        cache_lock("asked", renew=False) as asked,
        cache_lock("renewed", timeout=30) as renewed,
    ):
        server.restart()
        with pytest.raises(LockLost):
            asked.ensure()
        assert not asked.held
        clock.advance(11)
        wait_for(lambda: "renewed" in losses, 30, "the loss was not told")
        assert not renewed.held
        with pytest.raises(LockLost):
            renewed.ensure()
        assert asked.release() is False
        assert renewed.release() is False
    assert sorted(losses) == ["asked", "renewed"]
    errors = [one.getMessage() for one in caplog.records if one.levelno == logging.ERROR]
    for name in losses:
        assert sum(f"The lock '{name}' was lost" in error for error in errors) == 1
