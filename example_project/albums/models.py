"""Albums and their pictures."""

from __future__ import annotations

import uuid
from pathlib import PurePath

from django.core.files.base import ContentFile
from django.db import models
from django.db.models.fields.files import FieldFile
from django.urls import reverse
from django.utils import timezone

from django_celery_safe import IdempotentMixin
from django_celery_safe.models import StageRun


def upload_path(picture: Picture, name: str) -> str:
    """Return the path of an uploaded picture, which can be neither guessed nor overwritten."""
    return f"uploads/{uuid.uuid4()}{PurePath(name).suffix.lower()}"


def album_path(of_album: models.Model, name: str) -> str:
    """Return where a step writes what it made: done again, it writes the same file again."""
    return f"albums/{name}"


class Album(IdempotentMixin, models.Model):
    """A title, some pictures, and what a run of stages made of them."""

    title = models.CharField(max_length=80)
    email = models.EmailField("your e-mail address")
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    #: The latest run's. No foreign key: a run is deleted a week after its end, the album stays.
    run_id = models.BigIntegerField(null=True, editable=False)
    sheet = models.ImageField("contact sheet", upload_to=album_path, blank=True, editable=False)
    is_announced = models.BooleanField(default=False, editable=False)

    class Meta:
        ordering = ["-created_at", "-pk"]

    def __str__(self) -> str:
        return self.title

    def get_absolute_url(self) -> str:
        """Return the address of its page."""
        return reverse("albums:detail", args=[self.pk])

    def find_run(self) -> StageRun | None:
        """Return the run that makes the album; None: it was deleted long ago."""
        if self.run_id is None:
            return None
        return StageRun.objects.filter(pk=self.run_id).first()

    def save_sheet(self, jpeg: bytes) -> None:
        """Save the contact sheet."""
        _save_file(self, "sheet", f"{self.pk}/contact-sheet.jpg", jpeg)


class Picture(models.Model):
    """One picture of an album, as it came and as it is shown."""

    album = models.ForeignKey(Album, on_delete=models.CASCADE, related_name="pictures")
    name = models.CharField(max_length=100)
    upload = models.ImageField(upload_to=upload_path)
    image = models.ImageField(upload_to=album_path, blank=True, editable=False)
    thumbnail = models.ImageField(upload_to=album_path, blank=True, editable=False)
    #: The average one, as "#rrggbb".
    colour = models.CharField(max_length=7, blank=True, editable=False)

    class Meta:
        ordering = ["pk"]

    def __str__(self) -> str:
        return self.name

    def save_image(self, jpeg: bytes) -> None:
        """Save the picture as it is shown."""
        _save_file(self, "image", f"{self.album_id}/{self.pk}.jpg", jpeg)

    def save_thumbnail(self, jpeg: bytes) -> None:
        """Save the small one."""
        _save_file(self, "thumbnail", f"{self.album_id}/{self.pk}-small.jpg", jpeg)


def _save_file(row: models.Model, field: str, name: str, content: bytes) -> None:
    """Write a file and note it, and nothing else, in its row: other steps write there too."""
    file: FieldFile = getattr(row, field)
    file.save(name, ContentFile(content), save=False)
    row.save(update_fields=[field])
