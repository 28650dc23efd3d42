"""Fixtures: a carried task, and a worker that shuts down."""

from collections.abc import Callable

import pytest
from celery import signals

from django_celery_safe.resuming import checkpoints
from tests.sending.conftest import carried as carried


@pytest.fixture
def shut_down(monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """Say, as Celery does, that the worker of this process shuts down."""
    monkeypatch.setattr(checkpoints, "_shared", bytearray(1))
    return lambda: signals.worker_shutting_down.send("me", sig="TERM", how="Warm", exitcode=0)
