"""Work in threads of a worker's main process, beside the pool's forks."""

import os
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest

from django_celery_safe.delivery import worker
from django_celery_safe.delivery.worker import held_by_run, in_background
from django_celery_safe.leases.holder import HOST, Holder, encode_holder


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


class Received:
    """A request of Celery's for a message that process 4711 runs."""

    id, worker_pid = "ran here", 4711


@pytest.mark.parametrize(
    ("task_id", "host", "pid", "ours"),
    [
        ("ran here", HOST, 4711, True),
        ("ran here", HOST, 4712, False),  # another run has taken the lease over
        ("ran here", "elsewhere", 4711, False),
        ("not watched", HOST, 4712, True),
        ("not watched", "elsewhere", 4712, False),
    ],
)
def test_a_row_that_a_run_of_this_worker_holds(
    task_id: str, host: str, pid: int, ours: bool
) -> None:
    """A killed process may have lost its row to another one of the same machine."""
    request: Any = Received()
    worker._received.add(request)
    row = SimpleNamespace(holder=encode_holder("a row", Holder(host=host, pid=pid)))
    assert held_by_run(task_id)(row) is ours
