"""
The cost of importing the package, compared with Django and Celery.

It is to take 30 ms on a machine on which these take 90 ms or more. The limit is the ratio, since
a machine that has other work to do slows both.
"""

import os
import re
import subprocess
import sys

from tests.benchmarks.report import Figure
from tests.servers import ServerPool

#: How many processes import everything; the first compiles it.
PROCESSES = 15
#: Parts of Django and Celery that a project with tasks and models has imported anyway.
BEFORE = (
    "import celery.backends.rpc, celery.contrib.django.task, django.core.checks, django.db.models"
)
#: A line of ``-X importtime``: the µs of a module without those that it imports, and its name.
LINE = re.compile(r"import time: +(\d+) \| +\d+ \| +(\S+)")
PACKAGE = "django_celery_safe"


def run(servers: ServerPool) -> list[Figure]:
    """
    Return the sums of ours and of all others.

    The shortest time of each module counts, because other work of the machine slows some modules
    in each process.
    """
    shortest: dict[str, float] = {}
    for process in (measure() for _ in range(PROCESSES)):
        for name, spent in process.items():
            shortest[name] = min(spent, shortest.get(name, spent))
    ours = sum(spent for name, spent in shortest.items() if name.partition(".")[0] == PACKAGE)
    others = sum(shortest.values()) - ours
    return [
        Figure("Django and Celery, ms", others),
        Figure(f"{PACKAGE}, ms", ours),
        Figure(f"{PACKAGE} / Django and Celery", ours / others),
    ]


def measure() -> dict[str, float]:
    """Return the ms that each module takes, in a process of its own."""
    # The tests run without files of bytecode; a project has them.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-X", "importtime", "-c", f"{BEFORE}; import {PACKAGE}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {name: int(spent) / 1000 for spent, name in LINE.findall(done.stderr)}
