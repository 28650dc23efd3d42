"""What a worker's main process does before a run, and in threads while its pool forks."""

import os
from threading import Event, Timer

import pytest
from celery.app.task import Context

from django_celery_safe.delivery import endings
from django_celery_safe.delivery.call import has_header, run_for
from django_celery_safe.delivery.endings import in_background
from tests.concurrency.mailbox import Mailbox
from tests.sending.test_commit import switched_on


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_new_child_waits_for_background_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child is forked while a thread may hold a mutex that the child would inherit locked."""
    monkeypatch.setattr(endings, "LONGEST_FORK", 60.0)
    may_end, has_ended = Event(), Event()

    def work() -> None:
        may_end.wait(60)
        has_ended.set()

    future = in_background(work, "It failed.")
    Timer(0.2, may_end.set).start()
    child = os.fork()
    if child == 0:
        os._exit(0 if has_ended.is_set() else 1)
    future.result(60)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_run_begins_without_what_the_last_one_left(mailbox: Mailbox) -> None:
    """A time limit may have ended a run just before it was taken out of its context."""
    mailbox.task(switched_on, name="tests.look").delay()
    outcome = run_for(Context(id="limited"), mailbox.deliver, (mailbox.take_one(),), {})
    # Otherwise the next run could be taken for one without a header.
    assert (outcome, has_header.get()) == (("SUCCESS", []), None)
