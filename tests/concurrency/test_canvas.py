"""Duplicates and conflicts at each place of a canvas."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord, group
from celery.canvas import Signature
from celery.exceptions import ChordError, Reject
from django.db import transaction

from django_celery_safe import SafeTask, send_on_commit, single_instance
from tests.concurrency.mailbox import Mailbox, end_child
from tests.locks.renewals import get_lock, held_by

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("locks_in_memory")]


class Parts:
    """The members of a canvas, which note that they ran."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.ran: list[str] = []

        def note(name: str) -> str:
            self.ran.append(name)
            return name

        def keep(values: Any) -> Any:
            note("kept")
            return values

        def make(function: Any, name: str) -> Any:
            return mailbox.task(function, name=f"tests.{name}", base=SafeTask)

        self.once = make(single_instance(unique_until="end")(note), "once")
        #: A duplicate, once another has been sent.
        self.twin = self.once.si("twin")
        self.note, self.keep = make(note, "note"), make(keep, "keep").s()

    def step(self, name: str) -> Signature[Any]:
        """Return a member that returns its name."""
        signature: Signature[Any] = self.note.si(name)
        return signature

    def locked(self, on_conflict: str) -> Signature[Any]:
        """Return a member that runs under a lock of its own."""
        return self.step("locked").set(single_instance={"key": "key", "on_conflict": on_conflict})

    def run_all(self) -> list[str]:
        """Run what was sent, and what that sends; return what ran, sorted."""
        while messages := self.mailbox.take():
            for message in messages:
                state, error = self.mailbox.deliver(message)
                if state == "REJECTED":
                    end_child(self.mailbox.receive(message), error)
        return sorted(self.ran)


#: The canvas, what it returns, and what runs, once each.
PLACES: dict[str, tuple[Callable[[Parts], Signature[Any]], Any, str]] = {
    "chain, first": (lambda p: chain(p.twin, p.step("a"), p.step("b")), "b", "a b"),
    "chain, middle": (lambda p: chain(p.step("a"), p.twin, p.step("b")), "b", "a b"),
    "chain, last": (lambda p: chain(p.step("a"), p.step("b"), p.twin), None, "a b"),
    "group": (lambda p: group(p.step("a"), p.twin, p.step("b")), ["a", None, "b"], "a b"),
    "chord header": (lambda p: chord([p.step("a"), p.twin], p.keep), ["a", None], "a kept"),
    "chord body": (lambda p: chord([p.step("a"), p.step("b")], p.twin), None, "a b"),
    "chain over a group": (
        lambda p: chain(p.step("a"), group(p.twin, p.step("b")), p.keep),
        [None, "b"],
        "a b kept",
    ),
}


@pytest.mark.parametrize("send", [lambda canvas: canvas.apply_async(), send_on_commit])
@pytest.mark.parametrize("place", PLACES)
def test_a_canvas_goes_on_over_a_duplicate(
    place: str, send: Callable[[Any], Any], mailbox: Mailbox
) -> None:
    """At each place the duplicate returns None and does not run, everything else runs once."""
    parts, (make, value, ran) = Parts(mailbox), PLACES[place]
    first = parts.once.delay("twin")
    mailbox.take_one()
    with transaction.atomic():
        result = send(make(parts))
    assert parts.run_all() == ran.split()
    assert result.get(timeout=10, interval=0.01) == value
    assert get_lock(f"sent:{parts.once.lock_name('twin')}").holder.task_id == first.id


# Conflicts at the run.


def test_a_canvas_goes_on_over_a_conflict(mailbox: Mailbox) -> None:
    """A run that is skipped gives None to the rest of a chain, and to the body of a chord."""
    parts = Parts(mailbox)
    with held_by("tests.note:key", "other"):
        linked = chain(parts.locked("skip"), parts.keep).delay()
        joined = chord([parts.locked("skip"), parts.step("a")], parts.keep).delay()
        assert parts.run_all() == ["a", "kept", "kept"]
    assert linked.get(timeout=10, interval=0.01) is None
    assert joined.get(timeout=10, interval=0.01) == [None, "a"]
    assert linked.parent.state == "SUCCESS"


def test_a_canvas_fails_on_a_conflict(mailbox: Mailbox) -> None:
    """If a run is rejected, its chain and its chord fail, and nothing hangs."""
    parts = Parts(mailbox)
    with held_by("tests.note:key", "other"):
        linked = chain(parts.locked("reject"), parts.keep).delay()
        joined = chord([parts.locked("reject"), parts.step("a")], parts.keep).delay()
        assert parts.run_all() == ["a"]
    with pytest.raises(Reject):
        linked.get(timeout=10, interval=0.01)
    with pytest.raises((ChordError, Reject)):
        joined.get(timeout=10, interval=0.01)
    assert (linked.parent.state, joined.state) == ("FAILURE", "FAILURE")
