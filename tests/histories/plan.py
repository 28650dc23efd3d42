"""What a run is to do, as plain data that goes to every process."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.histories.records import Nemesis

#: What a process does at this moment, as the nemesis sees it.
IDLE, ASKING, HOLDING = 0, 1, 2

#: What is done with a lock that is held (methods of ``holders.LockUser``), and how often
#: of a hundred times: as in a long run, where everything happens often enough,
OFTEN = {
    "write_and_release": 40,
    "look_around_and_release": 22,
    "ensure_and_release": 15,
    "extend_and_release": 15,
    "linger_and_release": 5,
    "outstay_and_write": 1,
    "outlive_a_lease_and_release": 1,
    "abandon": 1,
}

#: and as in a short one, where what is rare must happen too.
ROUGH = {
    "write_and_release": 20,
    "look_around_and_release": 10,
    "ensure_and_release": 10,
    "extend_and_release": 12,
    "linger_and_release": 35,
    "outstay_and_write": 8,
    "outlive_a_lease_and_release": 2,
    "abandon": 3,
}

#: In which state a process is to be stopped, and how often of a hundred times.
WHEN = {HOLDING: 65, ASKING: 30, IDLE: 5}

#: What is done by those who waited for long: nothing that takes long.
QUICK = ("write_and_release", "look_around_and_release", "ensure_and_release")

#: Shortest and longest lease of those who are ready to wait as long, s: on Redis only
#: waiters with leases of a second and more are woken.
PATIENT_LEASES = (1.0, 1.5)


@dataclass(frozen=True)
class Plan:
    """
    What to record.

    Args:
        operations: Requests to the store that must have been answered, by all
            processes together.
        processes: How many use the locks.
        nemesis: ``pause`` stops processes for longer than their leases; ``restart``
            also restarts the server, which loses its memory.
        locks: Number of names; None: three for each four processes.
        leases: Shortest and longest lease, s.
        whole: Leases are of whole seconds.
        ways: What is done with a lock, and how often of a hundred times.
        when: In which state a process is to be stopped, and how often of a hundred times.
        seed: What the processes and the nemesis do; their timing is the machine's.
        at_least: The run lasts this long even if it has its operations before, s.
        at_most: The run fails when it takes longer, s.
        make_lock: Dotted path of what is called as ``cache_lock`` is.
        fences: Whether the store numbers its acquisitions.
        guarded: Whether the resource refuses writes with older fences.
    """

    operations: int
    processes: int = 8
    nemesis: Nemesis = "pause"
    locks: int | None = None
    leases: tuple[float, float] = (0.05, 0.3)
    whole: bool = False
    ways: Mapping[str, int] = field(default_factory=lambda: OFTEN)
    when: Mapping[int, int] = field(default_factory=lambda: WHEN)
    seed: int = 0
    at_least: float = 0.0
    at_most: float = 1800.0
    make_lock: str = "django_celery_safe.cache_lock"
    fences: bool = True
    guarded: bool = True

    @property
    def names(self) -> list[str]:
        """The locks' names."""
        number = max(1, self.processes * 3 // 4) if self.locks is None else self.locks
        return [f"lock-{index}" for index in range(number)]

    @property
    def longest_pause(self) -> float:
        """How long a process stands still at most, s."""
        return self.leases[1] * 2


class Board:
    """Shows what each process does at this moment: one byte for each, in shared memory."""

    def __init__(self, folder: Path, processes: int) -> None:
        path = folder / "board"
        if not path.exists():
            path.write_bytes(bytes(processes))
        with path.open("r+b") as file:
            self.states = mmap.mmap(file.fileno(), processes)
