"""The journal of the demo's worker: what ran in which process, and what came of it."""

from django.db import models


class Run(models.Model):
    """One run of a task: of a message that is delivered twice there are two."""

    task = models.CharField(max_length=100)
    task_id = models.CharField(max_length=100)
    pid = models.IntegerField()
    #: Celery's word: SUCCESS, RETRY, FAILURE, IGNORED; "": it goes on, or was killed.
    state = models.CharField(max_length=20)
    returned = models.JSONField(null=True)

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}] {self.state}"
