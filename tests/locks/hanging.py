"""Requests to the local store that wait until a test lets them go on."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from django_celery_safe.locks.stores.local import LocalStore


class Hanging:
    """Calls of one method that wait, where ``when`` is true of their arguments."""

    def __init__(self, method: str, when: Callable[..., bool]) -> None:
        self._method, self._when = getattr(LocalStore, method), when
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def call(self, store: LocalStore, *args: Any) -> Any:
        """Do what the method does, if need be later."""
        if self._when(*args):
            self.began.set()
            assert self.may_go_on.wait(60)
        return self._method(store, *args)


@contextmanager
def hanging(method: str, when: Callable[..., bool] = lambda *args: True) -> Iterator[Hanging]:
    """Let such calls wait until ``may_go_on``, or the end of the block."""
    hangs = Hanging(method, when)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, method, lambda store, *args: hangs.call(store, *args))
        try:
            yield hangs
        finally:
            hangs.may_go_on.set()


def in_background(*args: object) -> bool:
    """Return whether a thread that renews leases asks."""
    return threading.current_thread().name == "django_celery_safe leases"
