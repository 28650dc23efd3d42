"""The benchmarks: their harness, their arithmetic, and each of them on a small scale."""

import json
from types import ModuleType

import pytest

from django_celery_safe import cache_lock
from tests.benchmarks import __main__ as command
from tests.benchmarks import listing, renewal, report, waiting
from tests.benchmarks.locks import BACKENDS, caches_on
from tests.benchmarks.report import Figure, interleaved, ratio, shown, with_limits
from tests.benchmarks.waiting import Turn
from tests.servers import RedisServer


def test_a_ratio_compares_within_rounds() -> None:
    """A round in which the whole machine was slow does not change the ratio."""
    samples = {"floor": [1.0, 10.0, 1.0], "ours": [2.0, 20.0, 2.0]}
    assert ratio(samples, "ours", "floor") == 2


def test_candidates_are_measured_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate has one sample for each round, in µs per call."""
    monkeypatch.setattr(report, "WARM_UP", 0.01)
    samples = interleaved({"little": lambda: sum(range(10)), "much": lambda: sum(range(5000))}, 5)
    assert {name: len(values) for name, values in samples.items()} == {"little": 5, "much": 5}
    assert ratio(samples, "much", "little") > 5


@pytest.mark.parametrize(
    ("figure", "ok"),
    [
        (Figure("ratio", 1.15, limit=1.15), True),
        (Figure("ratio", 1.151, limit=1.15), False),
        (Figure("messages/s", 99, limit=100, better="higher"), False),
        (Figure("messages/s", 100, limit=100, better="higher"), True),
        (Figure("peer", 9.9), True),
    ],
)
def test_a_figure_keeps_to_its_limit(figure: Figure, ok: bool) -> None:
    """A limit is the worst value allowed; a figure without one is only for comparison."""
    assert figure.ok is ok


def test_a_limit_without_a_figure_is_an_error() -> None:
    """A limit that nothing is held to is noticed."""
    with pytest.raises(LookupError, match="django-redis / raw"):
        with_limits("locks", [])


@pytest.mark.parametrize(("value", "status"), [(1.0, 0), (1.2, 1)])
def test_the_command_fails_when_a_limit_is_missed(
    value: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``--json`` prints one object; the exit status says whether all limits were kept."""
    benchmark = ModuleType("locks")
    benchmark.run = lambda servers: [Figure("a", value, 1.1), Figure("b", 3.0)]  # type: ignore[attr-defined]
    monkeypatch.setattr(command, "import_module", lambda name: benchmark)
    monkeypatch.setattr(command, "with_limits", lambda name, figures: figures)
    assert command.main(["locks", "--json"]) == status
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert [(f["name"], f["limit"], f["ok"]) for f in figures] == [
        ("a", 1.1, not status),
        ("b", None, True),
    ]
    assert command.main(["locks"]) == status
    table = capsys.readouterr().out
    assert ("MISSED" in table) is bool(status)
    assert max(map(len, table.splitlines())) <= 80


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.0, "2"), (100_000.0, "100,000"), (1.234, "1.23"), (0.0042, "0.0042"), (0.0, "0")],
)
def test_a_small_figure_is_not_rounded_away(value: float, text: str) -> None:
    """A table shows enough of a number to compare it with its limit."""
    assert shown(value) == text


def turns_of(*taken_at: float, waited: float = 0.5, held: float = 1.0) -> list[Turn]:
    """Return the turns of a process that had the baton at these times."""
    return [Turn(moment - waited, moment, moment + held) for moment in taken_at]


def test_fairness_is_one_only_if_all_had_as_many_turns() -> None:
    """Jain's index is 1 for equal numbers of turns, and 1/n where one process had all."""
    assert waiting.jain_index([turns_of(0, 2), turns_of(1, 3)]) == 1
    assert waiting.jain_index([turns_of(0, 1, 2, 3), []]) == 0.5


def test_a_fight_is_read_in_the_order_of_its_turns() -> None:
    """Waits, changes of the owner and turns of two at once are found over all processes."""
    fight = [turns_of(0, 1, 4), turns_of(2, waited=1.5)]
    assert waiting.worst_wait(fight) == 1.5
    assert waiting.owner_changes(fight) == 2 / 4
    assert waiting.overlaps(fight) == 0
    assert waiting.overlaps([turns_of(0, 2), turns_of(1.9)]) == 1


def test_every_candidate_is_handed_over(redis_server: RedisServer) -> None:
    """A hand-off is measured for the floor, ours and the peers: later than the release."""
    with caches_on(redis_server):
        samples = waiting.hand_offs(redis_server, 3, 1)
    slow = dict.fromkeys(waiting.SLOW, 1)
    assert {name: len(taken) for name, taken in samples.items()} == {
        **dict.fromkeys([waiting.FLOOR, *BACKENDS, waiting.PYTHON_REDIS_LOCK], 3),
        **slow,
    }
    assert min(map(min, samples.values())) > 0


def test_a_lock_that_is_fought_for_has_one_holder(redis_server: RedisServer) -> None:
    """Processes that never pause have the lock in turn, and their turns are recorded."""
    with caches_on(redis_server):
        fight = waiting.fight(redis_server, next(iter(BACKENDS)), 2, 0.3)
    assert len(fight) == 2
    assert min(map(len, fight)) > 0
    assert waiting.overlaps(fight) == 0


def test_renewals_are_counted_where_they_arrive(redis_server: RedisServer) -> None:
    """Locks of one process are renewed by one thread and in one request a period."""
    with caches_on(redis_server):
        figures = renewal.watch(redis_server, 20, 3.0, 1)
    values = {figure.name: figure.value for figure in figures}
    assert values["renewing threads"] == 1
    assert values["locks lost"] == 0
    assert values["requests in a period"] >= 1
    assert values["CPU of a period, ms"] > 0


def test_only_locks_that_the_server_has_are_held(redis_server: RedisServer) -> None:
    """What its holder still believes in, but the server has no more, counts as lost."""
    with caches_on(redis_server):
        kept, gone = cache_lock("kept", renew=False), cache_lock("gone", renew=False)
        assert kept.acquire()
        assert gone.acquire()
        with redis_server.client() as client:
            (key,) = client.keys("*:gone")
            client.delete(key)
        assert renewal.count_held([str(kept.token), str(gone.token)]) == 1


def test_what_is_listed_is_compared_with_what_was_acquired(redis_server: RedisServer) -> None:
    """The listing is measured against an MGET, and a lock that is missing in it is counted."""
    redis_server.flush()
    with caches_on(redis_server):
        listing.fill(redis_server, 20, 50)
        figures = listing.measure(redis_server, 20, 1)
        missing = listing.measure(redis_server, 21, 1)[-1]
    values = {figure.name: figure.value for figure in figures}
    assert values[listing.OURS] > 0
    assert 0 < values["Python peak, MB"] < 4
    assert values["missed, twice or not there"] == 0
    assert missing.value == 1
