"""The two senders."""

import os
import random
import time

from tests.faults.scenario import enter, find_witness
from tests.faults.tasks.plan import Plan
from tests.faults.tasks.work import TASKS
from tests.processes import meet


def send(plan: Plan) -> None:
    """Send what the other sends too, at the same moments."""
    enter()
    # The same in both.
    chance = random.Random(f"{plan.seed}:sends")
    for number in range(plan.tasks):
        until, key = chance.choice(list(TASKS)), f"key-{chance.randrange(plan.keys)}"
        time.sleep(chance.expovariate(1 / plan.pause))
        meet(60)
        send_one(plan, number, until, key)


def send_one(plan: Plan, number: int, until: str, key: str) -> None:
    """Note that there is work to do, send a task, and note what came of it."""
    task_id = f"{plan.seed}-{number}-{os.getpid()}"
    asked = time.monotonic_ns()
    result = TASKS[until].apply_async((key,), task_id=task_id)
    duplicate_of = result.id if result.is_duplicate else None
    what = {"id": task_id, "until": until, "key": key, "asked": asked}
    find_witness().journal.write("sent", duplicate_of=duplicate_of, **what)
