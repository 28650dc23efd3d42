"""Requests to the local store that wait until a test lets them go on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_celery_safe.locks.stores.local import LocalStore


@contextmanager
def hanging(
    method: str, when: Callable[..., bool] = lambda *args: True
) -> Iterator[threading.Event]:
    """
    Let calls of a method wait until the end of the block; gives an event: one has begun.

    Args:
        when: Is true of the arguments of the calls that wait.
    """
    answer = getattr(LocalStore, method)
    begun, may_go_on = threading.Event(), threading.Event()

    def call(store: LocalStore, *args: Any) -> Any:
        if when(*args):
            begun.set()
            assert may_go_on.wait(60)
        return answer(store, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, method, call)
        try:
            yield begun
        finally:
            may_go_on.set()


def in_background(*args: object) -> bool:
    """Return whether a thread that renews leases asks."""
    return threading.current_thread().name == "django_celery_safe leases"
