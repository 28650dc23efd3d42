"""The process of the scenario that commits transactions with sends."""

from typing import Final

from django.db import transaction

from tests.faults.carried.sender import enter
from tests.faults.poison import work
from tests.faults.poison.plan import Plan

#: How many tasks one transaction sends.
BATCH: Final = 50


def send(plan: Plan) -> None:
    """Commit one transaction after the other."""
    enter()
    for first in range(0, plan.tasks, BATCH):
        with transaction.atomic():
            for number in range(first, min(first + BATCH, plan.tasks)):
                work.work.delay_on_commit(number, kills=number in plan.poisonous)
