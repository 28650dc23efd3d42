"""Work in threads of a worker's main process, beside the pool's forks."""

import os
from threading import Event, Timer

import pytest

from django_celery_safe.delivery import worker
from django_celery_safe.delivery.worker import in_background


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_new_child_waits_for_background_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child is forked while a thread may hold a mutex that the child would inherit locked."""
    monkeypatch.setattr(worker, "LONGEST_FORK", 60.0)
    may_end, has_ended = Event(), Event()

    def work() -> None:
        may_end.wait(60)
        has_ended.set()

    future = in_background(work, lambda: None, "It failed.")
    Timer(0.2, may_end.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if has_ended.is_set() else 1)
    future.result(60)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
