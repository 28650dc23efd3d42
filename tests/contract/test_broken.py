"""The contract's cases catch stores that break it."""

from functools import partial
from pathlib import Path

import pytest
from pytest_django import Settings

from tests.contract import cases
from tests.servers import RedisServer

#: Each fault, and the cases that must fail on it.
FAULTS: list[tuple[str, cases.Case]] = [
    ("NoOwnerCheckCache", cases.late_release_spares_the_new_holder),
    ("NoOwnerCheckCache", cases.operator_frees_only_what_was_seen),
    ("NoExpiryCache", cases.late_release_spares_the_new_holder),
    ("NoExpiryCache", cases.killed_holders_lock_ends_with_its_lease_by_processes),
    ("FencePerProcessCache", cases.fences_grow_by_processes),
    ("ReadThenWriteCache", partial(cases.one_winner_for_each_new_key_by_processes, keys=20)),
    (
        "ReadThenWriteCache",
        partial(cases.one_winner_for_each_expired_key_by_processes, keys=20),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "case"),
    FAULTS,
    ids=[f"{fault}-{getattr(case, 'func', case).__name__}" for fault, case in FAULTS],
)
def test_a_broken_store_fails(
    fault: str,
    case: cases.Case,
    settings: Settings,
    redis_server: RedisServer,
    tmp_path: Path,
) -> None:
    """A store with this fault fails this case."""
    redis_server.flush()
    settings.CACHES = {
        "default": {"BACKEND": f"tests.contract.broken.{fault}", "LOCATION": redis_server.url}
    }
    with pytest.raises((AssertionError, TimeoutError)):
        case(tmp_path)
