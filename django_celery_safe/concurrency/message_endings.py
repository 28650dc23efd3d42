"""
Frees the locks of runs that can't free them themselves, and of messages that never run.

A killed process frees nothing, and a revoked or unknown message never runs. ``delivery.endings``
reports most of these cases. The locks of a message and of its run are freed when the process of
the run has really ended.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ..delivery.copies import mark_end
from ..delivery.endings import Outcome, in_background, is_dead_soon
from ..delivery.header import Header
from ..leases.holder import place_names
from ..locks import HeldLock
from ..locks.stores import get_store
from .guard import find_guarded_as_asked, get_lock_name
from .options import Guarded
from .sent import find_sent


def settle(outcome: Outcome) -> None:
    """Free the locks of a message that has ended, or whose run has, as far as nobody else can."""
    match outcome.kind:
        case "over":
            sent = None if outcome.comes_again else find_sent(outcome.request)
            # Its run ended outside its guard, for example in a hook.
            if sent is not None and not sent.settled and sent.passed_on is None:
                sent.move(0)
        case "unknown" | "undecodable":
            if (sent := find_sent(outcome.request)) is not None:
                _in_background(lambda: sent.move(0))
        case _:
            asked = find_guarded_as_asked(outcome.task, outcome.request)
            if asked is not None and outcome.kind in ("revoked", "expired"):
                _in_background(lambda: _free_unless_running(outcome, asked))
            elif asked is not None and outcome.pid not in (None, os.getpid()):
                _in_background(lambda: _free_after_death(outcome, asked))


def _free_unless_running(outcome: Outcome, asked: tuple[Guarded, Header]) -> None:
    sent = find_sent(outcome.request)
    # The message may have been delivered twice and refused the second time, while the first
    # delivery still runs.
    if sent is not None and _find_run(outcome, asked) is None:
        sent.move(0)


def _free_after_death(outcome: Outcome, asked: tuple[Guarded, Header]) -> None:
    task, request, store = outcome.task, outcome.request, get_store()
    sent, held = find_sent(request), _find_run(outcome, asked)
    if held is not None and not outcome.ended(held.holder):
        held = None
    if held is None and sent is None:
        return

    # A carried message comes again by its row.
    comes_again = outcome.comes_again or (outcome.kind == "lost" and "attempt" in outcome.header)
    # As a run does at its own end; first, because its lease may expire right after its death.
    ended, done = not comes_again and outcome.when is None, False
    if held is not None and ended and task.acks_late:
        done = mark_end(task, request, store, time.time() - held.holder.since)
    if not is_dead_soon(outcome.pid or 0):
        return  # its locks end by their leases
    if held is not None:
        store.release(held.name, held.token, held.remaining)
    # If the message was delivered twice, the other delivery keeps its lock.
    if sent is not None and not comes_again and (outcome.is_only or done):
        sent.move(0.0 if ended else sent.lease(outcome.when, request.expires))


def _find_run(outcome: Outcome, asked: tuple[Guarded, Header]) -> HeldLock | None:
    """Return the lock that a run of this message holds; None: no run holds it."""
    name = get_lock_name(outcome.task, outcome.request, *asked)
    for place in place_names(name, asked[0].options.limit):
        held = get_store().peek(place)
        if held is not None and held.holder.task_id == outcome.request.id:
            return held._replace(name=place)
    return None


def _in_background(free: Callable[[], object]) -> None:
    failure = "A dead run's locks could not be freed and end by their leases."
    in_background(free, _leave_store, failure)


def _leave_store() -> None:
    """Close the connection of this thread, if it has its own: it would be dead by the next use."""
    if (store := get_store()).connects_threads:
        store.close()
