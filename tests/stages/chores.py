"""A relay's chores for runs of stages, done at once."""

from datetime import timedelta
from itertools import chain

from django_celery_safe.models import StageRun
from django_celery_safe.pruning import prune_some
from django_celery_safe.stages.repairs import UNSTARTED_AFTER, Repair, get_prunable, iter_repairs
from django_celery_safe.stages.step_table import StepTable


def sweep(alias: str, patience: timedelta = UNSTARTED_AFTER) -> list[Repair]:
    """Repair the runs that are stuck; return the repairs."""
    return list(chain.from_iterable(iter_repairs(StepTable(alias), patience)))


def prune(alias: str) -> int:
    """Delete the runs whose retention has expired; return how many."""
    runs = StageRun.objects.using(alias)
    before = runs.count()
    for rows in get_prunable(alias):
        prune_some(rows, 100, 1)
    return before - runs.count()
