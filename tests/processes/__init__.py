"""
Separate processes for tests, and oracles that watch them from outside the locks.

``waiting`` waits and finds ports, ``kept`` runs programs that can't outlive the
tests, ``functions`` runs test functions in processes of their own, ``worker``
starts real Celery workers, ``oracles`` records what really happened.
"""

from tests.processes.functions import (
    FunctionFailed,
    FunctionProcess,
    meet,
    run_in_processes,
    start_in_process,
    tell,
)
from tests.processes.kept import KeptProcess
from tests.processes.oracles import Gauge, Journal
from tests.processes.waiting import dead_port, wait_for
from tests.processes.worker import CeleryWorker

__all__ = [
    "CeleryWorker",
    "FunctionFailed",
    "FunctionProcess",
    "Gauge",
    "Journal",
    "KeptProcess",
    "dead_port",
    "meet",
    "run_in_processes",
    "start_in_process",
    "tell",
    "wait_for",
]
