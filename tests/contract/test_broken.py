"""The contract's cases catch stores that break it."""

from functools import partial
from pathlib import Path

import pytest
from pytest_django import Settings

from tests.contract import cases
from tests.servers import RedisServer

#: Each fault, and the cases that must fail on it.
FAULTS: list[tuple[str, cases.Case]] = [
    ("NoOwnerCheckCache", cases.late_holder_spares_the_new_one),
    ("NoOwnerCheckCache", cases.operator_frees_only_what_was_seen),
    ("NoExpiryCache", cases.holder_is_shown),
    ("NoExpiryCache", cases.killed_and_paused_holders_lose_their_locks_by_processes),
    ("FencePerProcessCache", cases.fences_grow_by_processes),
    ("ReadThenWriteCache", partial(cases.one_winner_for_each_new_key_by_processes, keys=20)),
    ("ReadThenWriteCache", partial(cases.one_winner_for_each_expired_key_by_processes, keys=20)),
]


def name_of(case: cases.Case) -> str:
    """Return the name of a case, also with arguments of its own."""
    return str(getattr(case, "func", case).__name__)


#: Broken stores that break each place of a lock, too.
OF_PLACES = [
    *[each for each in FAULTS if each[0] in {"NoOwnerCheckCache", "NoExpiryCache"}],
    ("OneTooManyCache", partial(cases.one_winner_for_each_new_key_by_processes, keys=20)),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fault", "case", "limit"),
    [
        pytest.param(fault, case, limit, id=f"{fault}-{name_of(case)}-of-{limit}")
        for limit, faults in (("1", FAULTS), ("3", OF_PLACES))
        for fault, case in faults
    ],
)
def test_a_broken_store_fails(
    fault: str,
    case: cases.Case,
    limit: str,
    settings: Settings,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A store with this fault fails this case."""
    redis_server.flush()
    cases.hold_other_places.cache_clear()
    monkeypatch.setenv(cases.LIMIT, limit)
    settings.CACHES = {
        "default": {"BACKEND": f"tests.faulty.{fault}", "LOCATION": redis_server.url}
    }
    with pytest.raises((AssertionError, TimeoutError)):
        case(tmp_path)
