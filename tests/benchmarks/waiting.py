"""
Waiting for a lock on Redis: how soon a waiter has it, and whether all get their turn.

The floor is a bare BLPOP that an LPUSH wakes: used as a baton, it is the least that
a hand-off can be. Every candidate is such a baton: two processes hand it over, then
several that never pause fight for it. Ours is fought for with three holders, too.
"""

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Any, NamedTuple

import redis
from redis.lock import Lock

from django_celery_safe import cache_lock
from tests.benchmarks.locks import LEASE, describe_floor
from tests.benchmarks.report import Figure
from tests.benchmarks.tools import BACKENDS, caches_on, keep_locks_in
from tests.processes import (
    FunctionProcess,
    meet,
    run_in_processes,
    start_in_process,
    tell,
    wait_for,
)
from tests.servers import RedisServer, ServerPool

#: Hand-offs of each candidate; those that take a tenth of a second are measured less often.
ROUNDS, SLOW_ROUNDS = 300, 30

#: Seconds, from and to, between the waiter's word that it waits and the release. A slow
#: candidate polls each 0.1 s: its release must hit any moment of that.
PAUSE, SLOW_PAUSE = (0.01, 0.03), (0.01, 0.11)

#: Processes that fight for one lock, for how long, and how long each holds it, s.
PROCESSES, SECONDS, HOLD = 8, 5.0, 0.001

FLOOR = "BLPOP"
REDIS_PY = "redis-py Lock"

#: Ours with several holders, and how many.
OURS = next(iter(BACKENDS))
PLACES, LIMIT = f"{OURS}, limit=3", 3

#: Candidates that fight.
FIGHTING = (OURS, PLACES)

#: The list that tells the waiter what to wait for next.
NEXT, END = "next", "end"


class Baton(NamedTuple):
    """A thing for one process at a time, or a few: ``take`` waits for it, ``give`` passes it on."""

    take: Callable[[], object]
    give: Callable[[], object]


class Turn(NamedTuple):
    """One time that a process had the baton: asked for, taken and given, s, monotonic."""

    asked_at: float
    taken_at: float
    given_at: float


def run(servers: ServerPool) -> list[Figure]:
    """Measure the hand-offs of all candidates in the same rounds, then let each be fought for."""
    server = servers.redis
    with caches_on(server):
        figures = figures_of_hand_offs(hand_offs(server))
        for name in FIGHTING:
            server.flush()
            turns = run_in_processes(take_turns, PROCESSES, server.url, name)
            figures += figures_of_fight(name, turns)
    return figures


@contextmanager
def batons_on(url: str) -> Iterator[tuple["redis.Redis", dict[str, Baton]]]:
    """Give this process's client and what it takes and gives: the floor, ours and the peer."""
    with redis.Redis.from_url(url) as client:
        locks: dict[str, Any] = {
            **{alias: cache_lock("ours", blocking_timeout=None) for alias in BACKENDS},
            PLACES: cache_lock("several", blocking_timeout=None, limit=LIMIT),
            REDIS_PY: Lock(client, "redis-py", timeout=LEASE),
        }
        floor = Baton(lambda: client.blpop(["baton"]), lambda: client.lpush("baton", "1"))
        yield client, {FLOOR: floor, **{name: _baton(name, lock) for name, lock in locks.items()}}


def _baton(name: str, lock: Any) -> Baton:
    def take() -> None:
        keep_locks_in(name if name in BACKENDS else OURS)
        assert lock.acquire()

    return Baton(take, lock.release)


def hand_offs(server: RedisServer) -> dict[str, list[float]]:
    """Hand each baton over to another process, in turn; return the µs that each time took."""
    server.flush()
    with (
        batons_on(server.url) as (client, batons),
        start_in_process(wait_in_turn, server.url) as waiter,
    ):
        batons[FLOOR].give()
        # A lock with free places is not handed over.
        samples: dict[str, list[float]] = {name: [] for name in batons if name != PLACES}
        # The first round connects, and is not counted.
        for number in range(ROUNDS + 1):
            names = [name for name in samples if name != REDIS_PY or number <= SLOW_ROUNDS]
            random.shuffle(names)
            for name in names:
                taken = hand_off(client, name, batons[name], waiter)
                samples[name] += [taken] if number else []
        client.rpush(NEXT, END)
        waiter.result()
    return samples


def hand_off(client: "redis.Redis", name: str, baton: Baton, waiter: FunctionProcess) -> float:
    """Take the baton, let the other process wait for it, give it; return the µs until it has it."""
    baton.take()
    client.rpush(NEXT, name)
    waiter.receive()
    if name != REDIS_PY:
        wait_for(lambda: client.info("clients")["blocked_clients"], 5, f"{name} did not block")
    time.sleep(random.uniform(*(SLOW_PAUSE if name == REDIS_PY else PAUSE)))
    given_at = time.monotonic()
    baton.give()
    taken_at: float = waiter.receive()
    return (taken_at - given_at) * 1e6


def wait_in_turn(url: str) -> None:
    """Take what the other process names, as soon as it gives it, and give it back."""
    with batons_on(url) as (client, batons):
        while (name := _next_name(client)) != END:
            tell("waiting")
            batons[name].take()
            taken_at = time.monotonic()
            batons[name].give()
            tell(taken_at)


def _next_name(client: "redis.Redis") -> str:
    answer: Any = client.blpop([NEXT])
    return str(answer[1].decode())


def figures_of_hand_offs(samples: Mapping[str, Sequence[float]]) -> list[Figure]:
    """Set the median hand-off of each candidate against that of the floor."""
    floor = statistics.median(samples[FLOOR])
    figures = [Figure(f"{FLOOR}, µs", floor, note=f"hand-off, p50; {describe_floor()}")]
    for name, taken in samples.items():
        if name != FLOOR:
            of = "ours" if name in BACKENDS else "peer"
            note = f"{of}; p95 {statistics.quantiles(taken, n=20)[-1] / 1000:.2f} ms"
            figures.append(Figure(f"{name} / {FLOOR}", statistics.median(taken) / floor, note=note))
    return figures


def take_turns(url: str, name: str) -> list[Turn]:
    """Take, hold and give the baton until the time is over."""
    turns: list[Turn] = []
    with batons_on(url) as (_, batons):
        baton = batons[name]
        baton.take()  # connects
        baton.give()
        meet()
        ends_at = time.monotonic() + SECONDS
        while (asked_at := time.monotonic()) < ends_at:
            baton.take()
            taken_at = time.monotonic()
            time.sleep(HOLD)
            turns.append(Turn(asked_at, taken_at, time.monotonic()))
            baton.give()
    return turns


def figures_of_fight(name: str, turns: Sequence[Sequence[Turn]]) -> list[Figure]:
    """Say how fair the fight was, whether it was one baton, and how long that lay around."""
    limit = LIMIT if name == PLACES else 1
    free = idle_times(turns, limit)
    median = f"p50 {statistics.median(free) * 1000:.2f} ms" if free else "never"
    order = sorted(
        ((turn, number) for number, of_one in enumerate(turns) for turn in of_one),
        key=lambda entry: entry[0].taken_at,
    )
    changes = sum(one != other for (_, one), (_, other) in pairwise(order))
    seconds = order[-1][0].taken_at - order[0][0].taken_at
    counts = [len(of_one) for of_one in turns]
    overlaps, ends = 0, [0.0] * limit
    for turn, _ in order:
        overlaps += turn.taken_at < ends[0]
        ends = sorted([*ends[1:], turn.given_at])
    worst = max(turn.taken_at - turn.asked_at for turn, _ in order)
    # 1 if all had as many turns, 1/n if one had all.
    jain = sum(counts) ** 2 / (len(counts) * sum(count**2 for count in counts))
    return [
        Figure(f"{name}: Jain fairness", jain, better="higher", note=f"{len(turns)} processes"),
        Figure(f"{name}: worst wait, s", worst),
        Figure(f"{name}: owner changes/s", changes / seconds, better="higher"),
        Figure(f"{name}: held by {'two' if limit == 1 else limit + 1}", overlaps),
        Figure(
            f"{name}: longest idle, s", max(free, default=0), note=f"while waited for; {median}"
        ),
    ]


def idle_times(turns: Sequence[Sequence[Turn]], limit: int = 1) -> list[float]:
    """Return each time, s, in which fewer than the limit had the baton and some waited for it."""
    changes: list[tuple[float, int, int]] = []
    for turn in chain.from_iterable(turns):
        changes += [(turn.asked_at, 0, 1), (turn.taken_at, 1, -1), (turn.given_at, -1, 0)]
    idle: list[float] = []
    holders = waiters = 0
    idle_from = None
    for moment, taken, asked in sorted(changes):
        holders, waiters = holders + taken, waiters + asked
        if holders >= limit or not waiters:
            idle += [] if idle_from is None else [moment - idle_from]
            idle_from = None
        elif idle_from is None:
            idle_from = moment
    return idle
