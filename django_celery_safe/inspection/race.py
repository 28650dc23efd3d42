"""
New processes of this project that race for locks, so that ``doctor`` can detect two holders.

They start like any other process of the project, with the settings that
``DJANGO_SETTINGS_MODULE`` names, and share no connection, thread or memory with their
starter. Each process tries each lock once, at the same moment of the machine's monotonic
clock, and reports when it held which lock. The processes end with their starter.
"""

from __future__ import annotations

import os
import pprint
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import Any, Final, NamedTuple, Self

import django
from django.conf import ENVIRONMENT_VARIABLE, settings
from django.db import connections

from .. import conf
from ..exceptions import CelerySafeError, LockBackendError
from ..foreign_errors import describe_error
from ..locks import CacheLock, cache_lock
from ..locks.stores import Location, get_store, locate

#: Seconds from one try to the next, and how long the winner holds the lock, s.
INTERVAL: Final = 0.01
HOLD: Final = 0.004
#: Longest time that a process takes to be set up, s.
START: Final = 60.0
#: How long processes get to receive the names of the locks, s.
WAKE_UP: Final = 0.1
#: How long after its end a process may take to report a race, s.
ANSWER: Final = 20.0
#: How long a process gets to end by itself, s.
END: Final = 2.0
#: How much longer than planned a race may take on a slow store, s.
EXTRA: Final = 10.0


class RaceFailed(Exception):
    """A race could not be run; the text says why, as a clause."""


#: A race without a fault needs at least this many tries to be evidence.
FEWEST_TRIES: Final = 10


class Holding(NamedTuple):
    """The time, by the monotonic clock, during which a process certainly held a lock."""

    name: str
    since: float
    until: float
    fence: int | None


class RaceOutcome(NamedTuple):
    """
    The report of one process about a race, or of all processes together.

    Attributes:
        tries: How many locks a process tried; for all processes, the smallest number.
        holdings: The locks that were held, in the order of their acquisition.
        errors: The errors of the store. A try that failed proves nothing; the other tries count.
    """

    tries: int
    holdings: list[Holding]
    errors: list[str]

    def overlaps(self) -> Counter[str]:
        """Return for each lock how many holdings started while another process held it."""
        held_until: dict[str, float] = {}
        counts: Counter[str] = Counter()
        for holding in self.holdings:
            before = held_until.get(holding.name, holding.since)
            counts[holding.name] += holding.since < before
            held_until[holding.name] = max(before, holding.until)
        return counts


def find_doubt(values: Mapping[str, int], errors: Sequence[str]) -> str:
    """Return why a race without a fault is no evidence, as a clause; "": it is evidence."""
    if errors:
        return f"{len(errors)} tries failed, so nothing is known. The first: {errors[0]}"
    if not values["acquired"] or not values["expired_acquired"]:
        return "no process got one of them, so nothing is known."
    if min(values["tries"], values["expired_tries"]) < FEWEST_TRIES:
        return (
            f"the store is so slow that there were fewer than {FEWEST_TRIES} tries, so nothing is "
            f"known. Examine it from a machine nearer to it."
        )
    return ""


class Racers:
    """
    Processes that race when :meth:`race` is called; all of them have ended after the block.

    Raises:
        RaceFailed: A process can't be started, or would keep its locks in another place.
    """

    def __init__(self, count: int, cache: str | conf.Unset = conf.UNSET) -> None:
        self._count, self._cache = count, cache
        self._racers: list[_Racer] = []

    def __enter__(self) -> Self:
        if not os.environ.get(ENVIRONMENT_VARIABLE):
            raise RaceFailed(
                "other processes can't be given these settings, which are in no module: "
                f"{ENVIRONMENT_VARIABLE} is not set"
            )
        try:
            for _ in range(self._count):
                self._racers.append(_Racer(self._cache))
        except BaseException:
            self.__exit__()
            raise
        return self

    def wait_until_ready(self) -> None:
        """Wait until all are set up; check that their settings keep locks in the same place."""
        ours = _settings_of(locate(self._cache))
        if any(racer.receive(START) != ours for racer in self._racers):
            raise RaceFailed(
                f"processes that are started with {ENVIRONMENT_VARIABLE}="
                f"{os.environ[ENVIRONMENT_VARIABLE]} keep their locks in another place than this "
                f"one, whose settings differ"
            )

    def race(self, names: Sequence[str], lease: float, limits: Mapping[str, int]) -> RaceOutcome:
        """
        Let all processes try each lock at the same moment, one lock after the other.

        Args:
            limits: The number of holders of the locks that may have more than one.
        """
        starts_at = time.monotonic() + WAKE_UP
        for racer in self._racers:
            racer.send((names, limits, lease, starts_at))
        longest = len(names) * INTERVAL + EXTRA + ANSWER
        outcomes: list[RaceOutcome] = [racer.receive(longest) for racer in self._racers]
        holdings = [holding for outcome in outcomes for holding in outcome.holdings]
        holdings.sort(key=lambda holding: holding.since)
        errors = [error for outcome in outcomes for error in outcome.errors]
        return RaceOutcome(min(outcome.tries for outcome in outcomes), holdings, errors)

    def __exit__(self, *error: object) -> None:
        """End the processes, each by its id; their locks end with their leases."""
        for racer in self._racers:
            racer.dismiss()
        for racer in self._racers:
            racer.wait()


class _Racer:
    """One process, seen from the one that started it."""

    def __init__(self, cache: str | conf.Unset) -> None:
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        try:
            self._log = TemporaryFile()  # noqa: SIM115 - closed by wait()
            self._pipe, theirs = Pipe()
            # Not multiprocessing: it would run this process's main module again, and leave an
            # extra process behind.
            with theirs:
                call = f"from {__name__} import take_part; take_part({theirs.fileno()})"
                self._process = subprocess.Popen(  # noqa: S603
                    [sys.executable, "-P", "-c", call],
                    env={**os.environ, "PYTHONPATH": path},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=self._log,
                    pass_fds=[theirs.fileno()],
                )
        except OSError as error:
            raise RaceFailed(f"no process can be started ({describe_error(error)})") from error
        self.send(cache)

    def send(self, value: Any) -> None:
        # If the process has ended, receive() reports it.
        with suppress(OSError):
            self._pipe.send(value)

    def receive(self, longest: float) -> Any:
        try:
            if not self._pipe.poll(longest):
                raise RaceFailed(f"process {self._process.pid} said nothing for {longest:.0f} s")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            raise RaceFailed(self._describe_end()) from None
        if isinstance(answer, RaceFailed):
            raise answer
        return answer

    def dismiss(self) -> None:
        self._pipe.close()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def wait(self) -> None:
        try:
            self._process.wait(END)
        except BaseException as error:
            self._process.kill()
            self._process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        finally:
            self._log.close()

    def _describe_end(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END)
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().split("\n")
        status = self._process.returncode
        return f"process {self._process.pid} ended with status {status} ({lines[-1][:200]})"


def _settings_of(location: Location) -> str:
    """Return the settings of a location as a text, to compare them with another process's."""
    if location.kind == "cache":
        values = settings.CACHES.get(location.alias, {})
    else:
        values = connections[location.alias].settings_dict
    values = {name: value for name, value in values.items() if name != "TEST"}
    # width=1 puts each element in its own line, so that sets are sorted, too.
    text = pprint.pformat((location, values), width=1)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


# The rest runs in the processes that race.


def take_part(descriptor: int) -> None:
    """Run the races that the process at the other end of this pipe sends, until it closes it."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    starter: Connection[Any, Any] = Connection(descriptor)
    try:
        django.setup()
        cache = starter.recv()
        with suppress(CelerySafeError):  # the race reports it, too
            # The first use of a store takes many times as long as later ones, and a process
            # that is late for its first tries has no competitor.
            get_store(cache).peek("exclusion")
        starter.send(_settings_of(locate(cache)))
        starter.send(_race(cache, *starter.recv()))
        starter.recv()
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001 - whatever it is, the starter has to know
        starter.send(RaceFailed(describe_error(error)))


def _end_with_starter() -> None:
    # The read returns however that process ends, and this thread runs even if others hang.
    os.read(0, 1)
    os._exit(0)


def _race(
    cache: str | conf.Unset,
    names: Sequence[str],
    limits: Mapping[str, int],
    lease: float,
    starts_at: float,
) -> RaceOutcome:
    outcome = RaceOutcome(0, [], [])
    ends_at = starts_at + len(names) * INTERVAL + EXTRA
    for number, name in enumerate(names):
        time.sleep(max(0.0, starts_at + number * INTERVAL - time.monotonic()))
        if time.monotonic() > ends_at:
            return outcome._replace(tries=number)
        try:
            limit = limits.get(name, 1)
            lock = cache_lock(name, timeout=lease, renew=False, cache=cache, limit=limit)
            _race_for_lock(lock, outcome.holdings)
        except LockBackendError as error:
            # A store with two winners may also raise errors, which must not hide that fault.
            outcome.errors.append(str(error))
    return outcome._replace(tries=len(names))


def _race_for_lock(lock: CacheLock, holdings: list[Holding]) -> None:
    if lock.acquire():
        since = time.monotonic()
        trusted_until = since + lock.remaining
        time.sleep(HOLD)
        until = min(time.monotonic(), trusted_until)
        holdings.append(Holding(lock.name, since, until, lock.fence))
        lock.release()
