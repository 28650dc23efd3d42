"""The nemesis of the outbox: it kills processes and the broker."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from tests.faults.outbox.oracle import AT_RANDOM, points_of
from tests.faults.outbox.plan import CUT_OFF, RELAY, Plan, Witness
from tests.faults.outbox.relaying import relay
from tests.faults.outbox.sender import send
from tests.processes import FunctionFailed, FunctionProcess, start_in_process, wait_for
from tests.processes.worker import catches
from tests.servers import Server

#: Shortest and longest life before a process is killed at a random moment, s.
LIFE = (0.2, 2.0)

#: A process that has not come to its point after so many seconds never will.
REACHED_WITHIN = 90.0

#: How often a process comes to its point, at most, before it dies there: a process with many
#: steps is to be interrupted at any of them.
HITS = {"inside the publication": 5, "after a publication": 5, "after the publication": 3}

#: Shortest and longest time that the broker is gone, or silent, and in between, s.
GONE, BETWEEN = (0.3, 2.0), (0.5, 2.5)

#: URLs of a port without a server: that of TCP's own multiplexer.
NOBODY = {"redis": "redis://127.0.0.1:1/1", "rabbitmq": "amqp://guest:guest@127.0.0.1:1//"}


class Victim:
    """
    A process that is killed again and again, and started again each time.

    Args:
        role: Its role in the plan.
        place: Its number among those of the plan.
        settings: Django settings of all processes.
    """

    def __init__(
        self, plan: Plan, witness: Witness, role: str, place: int, settings: dict[str, Any]
    ) -> None:
        self._plan, self._witness, self._role, self._place = plan, witness, role, place
        self._random = random.Random(f"{plan.seed}:{role}:{place}")
        ends = points_of(plan, role) * plan.rounds
        if role == RELAY:
            # The two share them.
            ends = ends[place % 2 :: 2]
        if role == CUT_OFF:
            settings = {**settings, "CELERY_BROKER_URL": NOBODY[plan.broker]}
        #: How it is to end, the last first: a point, or at a random moment.
        self._ends = ends + [AT_RANDOM] * plan.random_kills
        self._random.shuffle(self._ends)
        self._settings = settings
        self._point: str | None = None
        self._began = self._dies_at = 0.0
        self._process: FunctionProcess | None = None

    @property
    def is_spared(self) -> bool:
        """Whether it has been killed as often as planned."""
        return not self._ends

    def tend(self) -> None:
        """
        Kill it if it is time for that; if it is dead, note how, and start it again.

        Raises:
            RuntimeError: It does not come to its point, so the run would wait for ever.
        """
        now = time.monotonic()
        if self._process is None:
            self._start()
        elif not self._process.running:
            self._bury(self._process)
            self._start()
        elif self._dies_at and now > self._dies_at:
            self._process.kill()
            self._witness.record_kill(self._role, AT_RANDOM, self._process.pid)
        elif self._point and now > self._began + REACHED_WITHIN:
            raise RuntimeError(f"No {self._role} comes to the point {self._point!r}: see points.")

    def _start(self) -> None:
        end = self._ends[-1] if self._ends else None
        self._point = None if end == AT_RANDOM else end
        self._began = time.monotonic()
        self._dies_at = self._began + self._random.uniform(*LIFE) if end == AT_RANDOM else 0.0
        hit = self._random.randint(1, HITS.get(self._point or "", 1))
        function: Any = relay if self._role == RELAY else send
        more = (self._role, self._place, self._point, hit)
        self._process = start_in_process(
            function, self._plan, self._witness, *more, settings=self._settings
        )

    def _bury(self, process: FunctionProcess) -> None:
        kill = self._witness.kills().get(process.pid)
        if kill is None:
            process.result(1)  # raises what it raised
            raise RuntimeError(f"A {self._role} ended by itself.")
        if self._ends and kill["point"] == self._ends[-1]:
            self._ends.pop()
        process.close()

    def terminate(self) -> None:
        """Ask it to end, with SIGTERM if it relays, and wait for that."""
        if self._process is None:
            return
        if self._role == RELAY and self._process.running:
            pid = self._process.pid
            # One that has just begun would be killed by it, and could not say how it ended.
            wait_for(lambda: not psutil.pid_exists(pid) or catches(pid, signal.SIGTERM), 30)
            self._process.process.terminate()
        try:
            self._process.result(30)
        except FunctionFailed:
            # It came to the point at which it was to be killed only now.
            if self._process.pid not in self._witness.kills():
                raise
        self.close()

    def close(self) -> None:
        """End it, however."""
        if self._process is not None:
            self._process.close()
        self._process = None


class Troublemaker:
    """
    Kills and starts all processes, and has the broker stopped, killed and paused meanwhile.

    Args:
        settings: Django settings of all processes.
    """

    def __init__(
        self, plan: Plan, witness: Witness, broker: Server, settings: dict[str, Any]
    ) -> None:
        self.random = random.Random(f"{plan.seed}:nemesis")
        self.plan, self.witness, self.broker = plan, witness, broker
        self._victims = [
            Victim(plan, witness, role, place, settings) for place, role in enumerate(plan.roles)
        ]
        self._pool = ThreadPoolExecutor(1)
        self._troubles = self._pool.submit(self._trouble_broker)

    def strike(self) -> None:
        """Kill and start again the processes that are due, beside the troubles of the broker."""
        for victim in self._victims:
            victim.tend()

    @property
    def is_spent(self) -> bool:
        """Whether all harm is done that must be done."""
        return self._troubles.done() and all(victim.is_spared for victim in self._victims)

    def _trouble_broker(self) -> None:
        for what in self.plan.troubles * self.plan.rounds:
            time.sleep(self.random.uniform(*BETWEEN))
            begin = {"stopped": self.broker.stop, "killed": self.broker.kill}
            begin.get(what, self.broker.pause)()
            time.sleep(self.random.uniform(*GONE))
            (self.broker.resume if what == "paused" else self.broker.start)()
            self.witness.journal.write("broker", what=what)

    def calm(self) -> None:
        """Let the senders end by themselves, and the broker be there."""
        self.witness.end()
        for victim in self._victims[: sum(role != RELAY for role in self.plan.roles)]:
            victim.terminate()
        self._troubles.result()

    def terminate(self) -> None:
        """Let the relays end as ``SIGTERM`` lets them."""
        for victim in self._victims:
            victim.terminate()

    def close(self) -> None:
        """End all processes, however, and wait until the broker's troubles are over."""
        for victim in self._victims:
            victim.close()
        self._pool.shutdown()
