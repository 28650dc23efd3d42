"""A process that relays: ``manage.py celery_outbox relay``, in a hurry."""

from datetime import timedelta

from django_celery_safe.sending import commit, housekeeping
from django_celery_safe.sending import relay as relaying
from tests.faults import scenario
from tests.faults.outbox.broken import break_relay
from tests.faults.outbox.plan import Plan, Witness
from tests.faults.outbox.points import lay

#: For how long rows are claimed; a killed relay keeps them from others for this long.
LEASE = timedelta(seconds=2)

#: Longest wait for an answer of the broker, s.
LONGEST_WAIT = 0.7


def relay(plan: Plan, witness: Witness, role: str, place: int, point: str | None, hit: int) -> None:
    """Relay until told to end, or killed."""
    scenario.enter()
    hurry()
    break_relay(plan.broken, witness.folder)
    lay(role, point, hit, witness)
    scenario.relay()


def hurry() -> None:
    """Shorten all times of a relay, and the grace of a sender, and keep their order."""
    shorter = {
        "LEASE": LEASE,
        "LONGEST_WAIT": LONGEST_WAIT,
        "PUT_OFF": 0.5,
        "PUT_BEHIND": 1.0,
        "IDLE": 0.05,
        "SHORTEST_PAUSE": 0.1,
        "LONGEST_PAUSE": 0.5,
    }
    turns = {"MINUTE": 0.5, "AGAIN": 0.1}
    grace = {"GRACE": 1.0}
    for module, values in ((relaying, shorter), (housekeeping, turns), (commit, grace)):
        for name, value in values.items():
            assert hasattr(module, name)
            setattr(module, name, value)
