"""Albums: a title, the names of pictures, and the run of stages that makes them."""

from __future__ import annotations

from django.core.files.base import ContentFile
from django.core.files.storage import default_storage
from django.db import models
from django.urls import reverse

from django_celery_safe import IdempotentMixin
from django_celery_safe.models import StageRun

#: Name of the file with all pictures of an album.
SHEET = "contact-sheet"


class Album(IdempotentMixin, models.Model):
    """Some pictures, which are files beside each other, and a contact sheet of them."""

    title = models.CharField(max_length=80)
    email = models.EmailField()
    pictures = models.JSONField(default=list)
    #: No foreign key: a run is deleted a week after its end, the album stays.
    run_id = models.BigIntegerField(null=True)
    is_announced = models.BooleanField(default=False)

    class Meta:
        ordering = ["-pk"]

    def __str__(self) -> str:
        return self.title

    def get_absolute_url(self) -> str:
        """Return the address of its page."""
        return reverse("albums:detail", args=[self.pk])

    def find_run(self) -> StageRun | None:
        """Return the run that makes the album; None: it was deleted long ago."""
        return StageRun.objects.filter(pk=self.run_id).first()

    def path(self, name: str) -> str:
        """Return where a file is: a step that runs again writes the same file again."""
        return f"albums/{self.pk}/{name}.jpg"

    def write(self, name: str, content: bytes) -> None:
        """Save a file."""
        default_storage.save(self.path(name), ContentFile(content))

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        with default_storage.open(self.path(name)) as file:
            return file.read()

    def find_url(self, name: str) -> str | None:
        """Return a file's address; None: it is not there yet."""
        path = self.path(name)
        return default_storage.url(path) if default_storage.exists(path) else None
