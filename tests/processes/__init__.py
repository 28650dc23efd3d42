"""
Separate processes for tests, and oracles that watch them from outside the locks.

``waiting`` waits and finds ports, ``kept`` runs programs that can't outlive the
tests, ``functions`` runs test functions in processes of their own, ``worker``
starts real Celery workers, ``oracles`` records what really happened.
"""

from tests.processes.functions import FunctionFailed as FunctionFailed
from tests.processes.functions import FunctionProcess as FunctionProcess
from tests.processes.functions import meet as meet
from tests.processes.functions import run_in_processes as run_in_processes
from tests.processes.functions import start_in_process as start_in_process
from tests.processes.functions import tell as tell
from tests.processes.kept import KeptProcess as KeptProcess
from tests.processes.oracles import Gauge as Gauge
from tests.processes.oracles import Journal as Journal
from tests.processes.waiting import dead_port as dead_port
from tests.processes.waiting import wait_for as wait_for
from tests.processes.worker import CeleryWorker as CeleryWorker
