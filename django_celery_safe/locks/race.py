"""
New processes of this project that race for locks, so that ``doctor`` sees whether two get one.

They are started as any other process of the project is, with the settings that
``DJANGO_SETTINGS_MODULE`` names, and share no connection, thread or memory with whoever
starts them. Each tries each lock once, at the same moment of the clock that all processes
of a machine have in common, and tells when it held what. They end with their starter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import django
from django.conf import ENVIRONMENT_VARIABLE, settings
from django.db import connections

from .. import conf
from ..exceptions import LockBackendError, describe_error
from .lock import cache_lock
from .stores import Location, locate

#: Seconds from one try to the next, and for how long the one who got the lock holds it.
INTERVAL: Final = 0.01
HOLD: Final = 0.004
#: Longest that a process takes to be set up, s.
START: Final = 60.0
#: How long after its end a race may be told of, s.
ANSWER: Final = 20.0
#: How long a process gets to end by itself, s.
END: Final = 2.0
#: How much longer than planned a race goes on where the store is slow, s.
EXTRA: Final = 5.0


class RaceFailed(Exception):
    """A race could not be run; the text says why, as a clause."""


class Plan(NamedTuple):
    """
    What to race for.

    Attributes:
        names: The locks, one after the other.
        lease: How long a lease each asks for, s.
        starts_at: When to try the first one, by the monotonic clock.
    """

    names: Sequence[str]
    lease: float
    starts_at: float


class Holding(NamedTuple):
    """From when to when, by the monotonic clock, one process was sure to hold a lock."""

    name: str
    since: float
    until: float
    fence: int | None


class Outcome(NamedTuple):
    """
    What one process, or all of them, saw of a race.

    Attributes:
        tries: How often it tried; of all of them, the fewest.
        holdings: What it held, in the order in which it was acquired.
        errors: What the store failed with; those tries say nothing, and the others do.
    """

    tries: int
    holdings: list[Holding]
    errors: list[str]

    def overlaps(self) -> int:
        """Return how many holdings began while the same lock was held."""
        held_until: dict[str, float] = {}
        count = 0
        for holding in self.holdings:
            before = held_until.get(holding.name, holding.since)
            count += holding.since < before
            held_until[holding.name] = max(before, holding.until)
        return count


class Racers:
    """
    Processes that race whenever :meth:`race` says so; none is left after the block.

    Raises:
        RaceFailed: One can't be started, or would keep its locks elsewhere than this process.
    """

    def __init__(self, count: int, cache: str | conf.Unset = conf.UNSET) -> None:
        self._count, self._cache = count, cache
        self._racers: list[_Racer] = []

    def __enter__(self) -> Self:
        module = os.environ.get(ENVIRONMENT_VARIABLE)
        if not module:
            raise RaceFailed(
                "other processes can't be given these settings, which are in no module: "
                f"{ENVIRONMENT_VARIABLE} is not set"
            )
        try:
            for _ in range(self._count):
                self._racers.append(_Racer(self._cache))
        except BaseException:
            self.close()
            raise
        return self

    def wait_until_ready(self) -> None:
        """Wait until all are set up; see what their settings say of where locks live."""
        ours = _settings_of(locate(self._cache))
        for racer in self._racers:
            if racer.receive(START) != ours:
                raise RaceFailed(
                    f"processes that are started with {ENVIRONMENT_VARIABLE}="
                    f"{os.environ[ENVIRONMENT_VARIABLE]} keep their locks elsewhere than this "
                    f"one, whose settings differ"
                )

    def race(self, names: Sequence[str], lease: float) -> Outcome:
        """Let all of them try each lock at the same moment, one lock after the other."""
        plan = Plan(names, lease, time.monotonic() + INTERVAL * len(self._racers))
        for racer in self._racers:
            racer.send(plan)
        longest = len(names) * INTERVAL + EXTRA + ANSWER
        outcomes: list[Outcome] = [racer.receive(longest) for racer in self._racers]
        holdings = [holding for outcome in outcomes for holding in outcome.holdings]
        holdings.sort(key=lambda holding: holding.since)
        errors = [error for outcome in outcomes for error in outcome.errors]
        return Outcome(min(outcome.tries for outcome in outcomes), holdings, errors)

    def close(self) -> None:
        """End them, each by its id; what they hold ends by its lease."""
        for racer in self._racers:
            racer.dismiss()
        for racer in self._racers:
            racer.wait()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Racer:
    """One process, seen from the one that started it."""

    def __init__(self, cache: str | conf.Unset) -> None:
        with ExitStack() as opened:
            try:
                self._log = opened.enter_context(TemporaryFile())
                self._pipe, theirs = Pipe()
                opened.enter_context(self._pipe)
                # Not multiprocessing: it would run this process's main module again, and leave
                # a process of its own.
                with theirs:
                    self._process = subprocess.Popen(  # noqa: S603
                        [sys.executable, "-P", "-c", f"{BEGIN}({theirs.fileno()})"],
                        env={
                            **os.environ,
                            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
                        },
                        stdin=subprocess.PIPE,
                        stdout=subprocess.DEVNULL,
                        stderr=self._log,
                        pass_fds=[theirs.fileno()],
                    )
            except OSError as error:
                raise RaceFailed(f"no process can be started ({describe_error(error)})") from error
            opened.pop_all()  # closed by dismiss() and wait()
        self.send(cache)

    def send(self, value: Any) -> None:
        # Of a process that is gone, receive() tells.
        with suppress(OSError):
            self._pipe.send(value)

    def receive(self, longest: float) -> Any:
        try:
            answered = self._pipe.poll(longest)
            answer = self._pipe.recv() if answered else None
        except (EOFError, OSError):
            raise RaceFailed(self._describe_end()) from None
        if not answered:
            raise RaceFailed(f"process {self._process.pid} said nothing for {longest:.0f} s")
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
        lines = self._log.read().decode("utf-8", "replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        status = self._process.returncode
        return f"process {self._process.pid} ended with status {status} ({last[:200]})"


def _settings_of(location: Location) -> str:
    """Return all that the settings say of a location, to be compared with another process's."""
    if location.kind == "cache":
        given = settings.CACHES.get(location.alias, {})
    else:
        given = connections[location.alias].settings_dict
    told = {name: value for name, value in given.items() if name != "TEST"}
    return json.dumps([location, _with_text_keys(told)], default=_describe, sort_keys=True)


def _with_text_keys(value: object) -> object:
    # Others can't be sorted along with texts.
    if isinstance(value, dict):
        return {
            json.dumps(key, default=_describe): _with_text_keys(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return list(map(_with_text_keys, value))
    return value


def _describe(value: object) -> str:
    # The text of other objects may be of one process alone.
    return str(value) if isinstance(value, os.PathLike) else type(value).__qualname__


# What follows runs in the processes that race.

#: What such a process is to call.
BEGIN: Final = f"import {__name__} as race; race.take_part"


def take_part(descriptor: int) -> None:
    """Race as told by whoever has the other end of this pipe, until it is closed."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    starter: Connection[Any, Any] = Connection(descriptor)
    try:
        django.setup()
        cache = starter.recv()
        starter.send(_settings_of(locate(cache)))
        while True:
            starter.send(_race(starter.recv(), cache))
    except EOFError:
        pass
    except Exception as error:  # noqa: BLE001 - whatever it is, it is to be told
        starter.send(RaceFailed(describe_error(error)))


def _end_with_starter() -> None:
    # Closed however that process ends, and whatever this one hangs in.
    os.read(0, 1)
    os._exit(0)


def _race(plan: Plan, cache: str | conf.Unset) -> Outcome:
    outcome = Outcome(0, [], [])
    ends_at = plan.starts_at + len(plan.names) * INTERVAL + EXTRA
    for number, name in enumerate(plan.names):
        at = plan.starts_at + number * INTERVAL
        time.sleep(max(0.0, at - time.monotonic()))
        if time.monotonic() > ends_at:
            return outcome._replace(tries=number)
        try:
            _try(name, plan.lease, cache, outcome.holdings)
        except LockBackendError as error:
            # A store that lets two win may fail, too: the one must not hide the other.
            outcome.errors.append(str(error))
    return outcome._replace(tries=len(plan.names))


def _try(name: str, lease: float, cache: str | conf.Unset, holdings: list[Holding]) -> None:
    lock = cache_lock(name, timeout=lease, renew=False, cache=cache)
    if lock.acquire():
        since = time.monotonic()
        trusted_until = since + lock.remaining
        time.sleep(HOLD)
        until = min(time.monotonic(), trusted_until)
        holdings.append(Holding(name, since, until, lock.fence))
        lock.release()
