"""The benchmarks: their harness, their arithmetic, and each of them on a small scale."""

import json
import time
from itertools import count
from types import ModuleType
from typing import Any

import pytest
from pytest_django import Settings

from django_celery_safe import cache_lock
from django_celery_safe.models import IdempotencyRecord, OutboxMessage
from tests.benchmarks import __main__ as command
from tests.benchmarks import (
    carried,
    imports,
    inspection,
    listing,
    once,
    outage,
    outbox,
    renewal,
    report,
    stages,
    tasks,
    waiting,
)
from tests.benchmarks.locks import BACKENDS, caches_on
from tests.benchmarks.once import Measured
from tests.benchmarks.outbox import Send
from tests.benchmarks.report import Figure, interleaved, ratio, shown, with_limits
from tests.benchmarks.tasks import Batch
from tests.benchmarks.waiting import Turn
from tests.conftest import MakeDatabase
from tests.processes import start_in_process, tell
from tests.servers import RedisServer

pytestmark = pytest.mark.nightly


def test_a_ratio_compares_within_rounds() -> None:
    """A round in which the whole machine was slow does not change the ratio."""
    samples = {"floor": [1.0, 10.0, 1.0], "ours": [2.0, 20.0, 2.0]}
    assert ratio(samples, "ours", "floor") == 2


@pytest.mark.quarantine("2026-11-26", "a ratio of measured times")
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
    assert waiting.overlaps([turns_of(0, 2), turns_of(1.9)], 2) == 0
    assert waiting.overlaps([turns_of(0), turns_of(0.4), turns_of(0.8)], 2) == 1


def test_idle_is_what_fewer_hold_than_may_while_others_wait() -> None:
    """A time counts if fewer than the limit had the baton, and somebody waited for it."""
    fight = [turns_of(0), turns_of(1.25, waited=1.25)]
    assert waiting.idle_times(fight) == [0.5, 0.25]
    assert waiting.idle_times(fight, 2) == [1.75]


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


@pytest.mark.parametrize(("name", "limit"), [(waiting.OURS, 1), (waiting.PLACES, waiting.LIMIT)])
def test_a_lock_that_is_fought_for_has_its_holders(
    redis_server: RedisServer, name: str, limit: int
) -> None:
    """Processes that never pause have the lock in turn, and their turns are recorded."""
    with caches_on(redis_server):
        fight = waiting.fight(redis_server, name, limit + 1, 0.3)
    assert len(fight) == limit + 1
    assert min(map(len, fight)) > 0
    assert waiting.overlaps(fight, limit) == 0


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
    """A lock that its holder still relies on, but the server has no more, counts as lost."""
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


@pytest.mark.django_db
def test_rows_that_a_list_leaves_out_are_counted(redis_server: RedisServer) -> None:
    """The command is measured plain and as JSON, and the admin's page; missing figures show."""
    redis_server.flush()
    with caches_on(redis_server):
        listing.fill(redis_server, 20, 0)
        values = {figure.name: figure.value for figure in inspection.measure(20)}
        missing = inspection.measure_list(21, "list")[-1]
    assert values["list: rows missed"] == values["list --json: rows missed"] == 0
    assert 0 < values["list: Python peak, MB"] < 20
    assert values["admin: first page, s"] > 0
    assert missing.value == 1


def test_round_trips_of_tasks_are_counted_where_they_arrive() -> None:
    """A run takes two round trips, and up to two more for the message's lock; a unique send one."""
    with start_in_process(tasks.measure, 1, 20) as measuring:
        batches = measuring.result()
    trips = {name: (batch.send_trips, batch.run_trips) for name, (batch,) in batches.items()}
    assert {name: trips[name] for name in (tasks.FLOOR, *tasks.OURS)} == {
        tasks.FLOOR: (0, 0),
        tasks.SINGLE: (0, 2),
        tasks.UNTIL_START: (1, 3),
        tasks.UNTIL_END: (1, 4),
    }
    assert all(min(one.send, one.send_cpu, one.run, one.run_cpu) > 0 for (one,) in batches.values())


def test_tasks_are_compared_with_the_floor_of_their_round() -> None:
    """Ratios are of CPU and within rounds; round trips are means, speeds are medians."""
    slow = Batch(400, 200, 0, 2000, 1000, 0)
    floors = [Batch(*(value * times for value in slow)) for times in (0.5, 1, 3)]
    ours = [Batch(one.send, one.send_cpu * 3, 1, 4000, one.run_cpu * 2, 2) for one in floors]
    ours[0] = ours[0]._replace(run_trips=5)
    ours[2] = ours[2]._replace(run_cpu=floors[2].run_cpu / 2)
    bare = [one._replace(run_cpu=one.run_cpu * 1.6) for one in floors]
    figures = tasks.figures_of({tasks.FLOOR: floors, tasks.RAW: bare, tasks.SINGLE: ours})
    values = {figure.name: figure.value for figure in figures}
    assert values["plain, µs of CPU"] == 1000
    assert values["single_instance / plain"] == 2
    assert values["single_instance / raw lock"] == 1.25
    assert values[".delay(), single_instance / plain"] == 3
    assert values["single_instance: trips of a run"] == 3
    assert values["single_instance: trips of a send"] == 1
    assert values["single_instance: tasks/s"] == 250
    assert values["plain: tasks/s"] == 500


def test_relays_and_sends_of_the_outbox_are_measured(
    redis_server: RedisServer, postgres_alias: str, settings: Settings
) -> None:
    """All that relays and a producer send arrives, a send is one query, and each has its time."""
    settings.CELERY_BROKER_URL = redis_server.url
    row = outbox.a_row(postgres_alias)
    rates = outbox.measure_relays(redis_server, postgres_alias, row, 1, 150)
    with start_in_process(outbox.measure_sends, postgres_alias, 2, 3) as measuring:
        sends, queries = measuring.result()
    assert row["task"] == outbox.plain.name
    assert list(rates) == [outbox.PRODUCER, outbox.RELAY, outbox.TWO_RELAYS]
    assert all(rate > 0 for (rate,) in rates.values())
    assert queries == 1
    assert len(sends) == 2
    assert min(map(min, sends)) > 0


def test_carried_tasks_run_beside_plain_ones(make_database: MakeDatabase) -> None:
    """Each candidate is sent and run, the peer too if it is installed, and leaves no row."""
    alias, of_peer = make_database("postgres"), make_database("postgres")
    with start_in_process(carried.measure, alias, of_peer, 1) as measuring:
        batches = measuring.result(carried.LONGEST)
    peers = [carried.PEER] if carried.HAS_PEER else []
    assert list(batches) == [carried.PLAIN, carried.CARRIED, *peers]
    assert all(min(one.send, one.run, one.run_cpu) > 0 for (one,) in batches.values())
    assert not OutboxMessage.objects.using(alias).exists()


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures say so, and nothing is set against it."""
    monkeypatch.setattr(carried, "HAS_PEER", False)
    batch = Batch(400, 200, 0, 2000, 1000, 0)
    figures = carried.figures_of({carried.PLAIN: [batch], carried.CARRIED: [batch]})
    notes = {figure.name: figure.note for figure in figures}
    assert notes["plain: tasks/s"] == "not installed: procrastinate"
    assert not any(name.startswith(carried.PEER) for name in notes)


def test_carried_tasks_are_compared_with_plain_ones_of_their_round() -> None:
    """Ratios are within rounds; speed is that of the median."""
    plain = [Batch(100 * slow, 0, 0, 2000 * slow, 1000 * slow, 0) for slow in (1, 3, 2)]
    ours = [Batch(one.send * 3, 0, 0, one.run * 2, one.run_cpu * 1.5, 0) for one in plain]
    figures = carried.figures_of({carried.PLAIN: plain, carried.CARRIED: ours, carried.PEER: plain})
    values = {figure.name: figure.value for figure in figures}
    assert values["carried / plain"] == 1.5
    assert values["carried send / plain"] == 3
    assert values["procrastinate / plain"] == 1
    assert (values["plain: tasks/s"], values["carried: tasks/s"]) == (250, 125)


def test_queries_of_a_carried_task_are_counted(make_database: MakeDatabase) -> None:
    """A send is one and a run two; looks find what is due among rows like the one that it wrote."""
    alias, other = make_database("postgres"), make_database("postgres")
    with start_in_process(carried.count_queries, alias) as counting:
        queries, row = counting.result()
    figures = {figure.name: figure.value for figure in carried.figures_of_queries(queries)}
    assert figures == {"queries of a send": 1, "queries of a run": 2}
    assert row["attempt"]
    for name, due_at in carried.SENT.items():
        for each in (alias, other):
            outbox.fill(each, row, 300, due_at)
        due = 0 if name == "nothing due" else carried.RELAYED
        samples = outbox.measure_looks(alias, other, 2, due=due)
        assert [len(times) for times in samples.values()] == [2] * 4
        assert OutboxMessage.objects.using(alias).sent().count() == 300


@pytest.mark.quarantine("2026-11-26", "compares measured times")
def test_what_an_outage_adds_to_a_commit_is_measured(postgres_alias: str) -> None:
    """A silent broker costs its timeout, one that refuses nearly nothing, and no send nothing."""
    with start_in_process(outage.measure, postgres_alias, 1) as measuring:
        times = measuring.result(outage.LONGEST)
    figures = {figure.name: figure.value for figure in outage.figures_of(times)}
    assert set(figures) >= set(json.loads(report.LIMITS.read_text())["outage"])
    silent = [value for name, value in figures.items() if name.startswith("silent")]
    assert len(silent) == len(outage.SENDS)
    assert min(silent) > 0.5
    assert figures["redis refuses: added, s"] < outage.TIMEOUT / 2


def test_looks_into_the_outbox_are_measured_in_both_sizes(
    make_database: MakeDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outbox holds as many rows as it was filled with, as many due as its mixture says."""
    monkeypatch.setattr(report, "WARM_UP", 0.01)
    few, many = make_database("postgres"), make_database("postgres")
    row = outbox.a_row(few)
    due = {}
    for name, due_at in outbox.MIXTURES.items():
        outbox.fill(few, row, 300, due_at)
        outbox.fill(many, row, 600, due_at)
        samples = outbox.measure_looks(few, many, 2)
        rows = OutboxMessage.objects.using(many)
        due[name] = (rows.pending().count(), rows.due().count())
        assert [len(times) for times in samples.values()] == [2] * 4
    assert due == {"all due": (600, 600), "few due": (600, outbox.SOME_DUE)}
    assert outbox.time_status(many) > 0


def test_the_outbox_is_compared_with_the_floors_of_its_round() -> None:
    """Relays are set against the producer of their round, what a send adds against an INSERT."""
    rates = {
        outbox.PRODUCER: [100.0, 10.0, 50.0],
        outbox.RELAY: [250.0, 30.0, 100.0],
        outbox.TWO_RELAYS: [400.0, 40.0, 200.0],
    }
    sends = [Send(100 * slow, 150 * slow, 300 * slow) for slow in (1, 3, 2)]
    samples = {"due(), few": [1.0], "due(), many": [2.0], "claim, few": [2], "claim, many": [6]}
    figures = [
        *outbox.figures_of_relays(rates),
        *outbox.figures_of_sends(sends, 1),
        *outbox.figures_of_looks("all due", samples),
    ]
    values = {figure.name: figure.value for figure in figures}
    assert values["relay / one producer"] == 2.5
    assert values["two relays / one producer"] == 4
    assert values["relay: messages/s"] == 100
    assert values["outbox send, added / INSERT"] == 1.5
    assert values["outbox send / INSERT"] == 3
    assert values["outbox send, µs"] == 600
    assert values["due() at 1,000,000 / 1,000, all due"] == 2
    assert values["claim at 1,000,000 / 1,000, all due"] == 3
    assert {figure.name for figure in figures if figure.better == "higher"} == {
        *(f"{name} / {outbox.PRODUCER}" for name in (outbox.RELAY, outbox.TWO_RELAYS)),
        *(f"{name}: messages/s" for name in rates),
    }


def test_things_are_done_once_and_looked_at_again(make_database: MakeDatabase) -> None:
    """Ours and the floors have a time in every round, and a repeat of a message is one query."""
    make_database("postgres", once.ALIAS)
    sqlite = make_database("sqlite-immediate")
    with start_in_process(once.measure, sqlite, 2, 3) as measuring:
        measured = measuring.result()
    samples = measured[:5]
    assert [list(one) for one in samples] == [
        [once.BY_HAND, once.DO_ONCE],
        [once.BY_HAND, once.DO_ONCE],
        [once.READ, once.BY_HAND, once.DO_ONCE],
        [once.RECORD, once.FIRST_RUN],
        [once.BY_KEY, once.REPEAT],
    ]
    assert all(len(times) == 2 and min(times) > 0 for one in samples for times in one.values())
    assert measured.run_queries > measured.repeat_queries == 1


def test_a_row_that_was_not_done_is_noticed(
    sqlite_immediate_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that is fast because it does nothing is an error."""
    monkeypatch.setattr(once, "do_once", lambda alias: lambda pk: None)
    with pytest.raises(AssertionError, match="a row was not done"):
        once.measure_firsts(sqlite_immediate_alias, 1, 2)


def test_a_task_runs_for_a_message_outside_of_a_worker(make_database: MakeDatabase) -> None:
    """A delivery counts as a message, whose id the record has, and not as a direct call."""
    alias = make_database("postgres", once.ALIAS)
    task_id = once.deliver(7)
    record = IdempotencyRecord.objects.using(alias).get()
    assert json.loads(record.result) == {"charge": 7}
    assert task_id in record.holder


def test_each_call_that_counts_as_the_first_has_a_number_of_its_own() -> None:
    """Candidates are called as often as each other, in turn, and never twice for a number."""
    seen: dict[str, list[int]] = {"one": [], "other": []}
    candidates = {name: numbers.append for name, numbers in seen.items()}
    samples = once.interleaved_firsts(candidates, count(), 3, 5)
    assert {name: len(times) for name, times in samples.items()} == {"one": 3, "other": 3}
    assert sorted(seen["one"] + seen["other"]) == list(range((3 + 1) * 5 * 2))
    turns = zip(seen["one"], seen["other"], strict=True)
    assert all(abs(one - other) == 1 for one, other in turns)


def test_doing_once_is_compared_with_the_floors_of_its_round() -> None:
    """Ratios are within rounds; what was counted is shown as it is."""
    hand = [100.0, 300.0, 200.0]
    by_hand, ours = {once.BY_HAND: hand}, {once.DO_ONCE: [110.0, 360.0, 220.0]}
    slow = {once.DO_ONCE: [200.0, 600.0, 400.0]}
    figures = once.figures_of(
        Measured(
            firsts=by_hand | ours,
            sqlite=by_hand | slow,
            done=by_hand | slow | {once.READ: [50.0, 150.0, 100.0]},
            runs={once.RECORD: hand, once.FIRST_RUN: [300.0, 900.0, 6.0]},
            repeats={once.BY_KEY: hand, once.REPEAT: [150.0, 450.0, 3.0]},
            run_queries=6,
            repeat_queries=1,
        )
    )
    assert {figure.name: round(figure.value, 9) for figure in figures} == {
        "by hand, µs": 200,
        "do_once / by hand": 1.1,
        "by hand, SQLite, µs": 200,
        "do_once / by hand, SQLite": 2,
        "done: do_once / by hand": 2,
        "done: do_once / bare read": 4,
        "INSERT + UPDATE, µs": 200,
        "first run / INSERT + UPDATE": 3,
        "queries of a first run": 6,
        "query by key, µs": 200,
        "repeat / query by key": 1.5,
        "queries of a repeat": 1,
    }


def use_cpu() -> None:
    """Use some CPU, tell how much that was, and use no more."""
    while (used := time.process_time()) < 0.5:
        pass
    tell(used)
    time.sleep(60)


def test_the_cpu_of_another_process_is_what_it_says_itself() -> None:
    """The clock of a process is read from outside."""
    with start_in_process(use_cpu) as other:
        told = other.receive()
        assert told <= tasks.cpu_of_process(other.pid) < told + 0.1


def test_an_import_is_measured_by_the_shortest_time_of_each_module() -> None:
    """Other work of the machine counts only where it met a module in each process."""
    measured = [
        {"celery": 9.0, "django_celery_safe": 1.0, "django_celery_safe.conf": 5.0},
        {"celery": 4.0, "django_celery_safe": 3.0, "django_celery_safe.conf": 1.0},
    ]
    assert [figure.value for figure in imports.figures_of(measured)] == [4, 2, 0.5]
    assert imports.measure().keys() > {"celery", "django.db.models", "django_celery_safe.conf"}


def test_queries_of_a_step_are_counted(
    make_database: MakeDatabase, redis_server: RedisServer
) -> None:
    """They are those of one step, whose message no worker gets, and as many in a larger stage."""
    alias = make_database("postgres")
    settings = stages.worker_settings(alias, redis_server)
    with start_in_process(queries_of_stages, alias, settings) as counting:
        assert counting.result(60) == [3, 3]


def queries_of_stages(alias: str, settings: dict[str, Any]) -> list[int]:
    """Count in a process whose Celery app is new."""
    stages.use_app(settings)
    with stages.runs_in(alias):
        return [stages.count_queries(alias, size) for size in (3, 20)]


def test_stages_are_compared_with_the_canvas_of_their_round() -> None:
    """Ratios are within rounds; what was counted is shown as it is."""
    floor = [1.0, 3.0, 2.0]
    figures = stages.figures_of(
        stages.Measured(
            samples={
                stages.CHAIN: floor,
                stages.MANY: [2.0, 6.0, 1.0],
                stages.CHORD: floor,
                stages.ONE: [3.0, 9.0, 6.0],
            },
            growth={
                stages.one_stage(10): floor,
                stages.one_stage(100): floor,
                stages.ONE: floor,
                stages.one_stage(4000): [4.0, 12.0, 8.0],
            },
            queries={10: 5, 1000: 5},
        )
    )
    assert {figure.name: round(figure.value, 9) for figure in figures} == {
        "chain of chords, s": 2,
        "20 stages x 10 steps, s": 2,
        "20 stages x 10 steps / chain of chords": 2,
        "chord of 1,000, s": 2,
        "1 stage x 1,000 steps, s": 6,
        "1 stage x 1,000 steps / chord of 1,000": 3,
        "1 stage x 10 steps, s": 2,
        "1 stage x 100 steps, s": 2,
        "1 stage x 4,000 steps, s": 8,
        "1 stage x 4,000 steps / 1,000": 4,
        "queries of a step, 1 of 10": 5,
        "queries of a step, 1 of 1,000": 5,
    }
