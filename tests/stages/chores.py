"""A relay's chores for runs of stages, done at once."""

from django_celery_safe.models import StageRun
from django_celery_safe.sending.housekeeping import prune_some


def prune(alias: str) -> int:
    """Delete the runs whose retention has expired; return how many."""
    runs = StageRun.objects.using(alias)
    before = runs.count()
    for rows in runs.prunable():
        prune_some(rows, 100, 1)
    return before - runs.count()
