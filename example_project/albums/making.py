"""How an album is made: one transaction, and a run of stages that begins when it commits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from django.core.files.base import File
from django.db import transaction

from django_celery_safe import stages
from django_celery_safe.models import StageRun

from .models import Album, Picture
from .tasks import fetch, index, make_contact_sheet, make_thumbnail, notify

#: The page's names for the stages, in their order.
NAMES: Final = ("Fetch", "Thumbnails and index", "Contact sheet", "Notify")


class Stage(NamedTuple):
    """One stage of an album's run, as its page shows it."""

    name: str
    done: int
    total: int
    status: stages.Status


@transaction.atomic
def create_album(title: str, email: str, files: Iterable[File[bytes]]) -> Album:
    """
    Save an album with its pictures, and begin to make it.

    The run is written in the same transaction: rolled back, there is none; committed,
    it begins.
    """
    album = Album.objects.create(title=title, email=email)
    pictures = [
        Picture.objects.create(album=album, name=(file.name or "picture")[-100:], upload=file)
        for file in files
    ]
    run = stages.start(
        list(_plan(pictures)),
        {"album": album.pk},
        key=f"album:{album.pk}",
        name=f"make {album}",
        url=album,
    )
    album.run_id = run.pk
    album.save(update_fields=["run_id"])
    return album


def _plan(pictures: list[Picture]) -> Iterator[tuple[Any, ...]]:
    """The steps: one fetch and one thumbnail for each picture, so that those run in parallel."""
    for picture in pictures:
        yield fetch, 4, {"picture": picture.pk}
    for picture in pictures:
        yield make_thumbnail, 3, {"picture": picture.pk}
    yield index, 3
    yield make_contact_sheet, 2
    yield notify, 1


def stages_of(run: StageRun) -> list[Stage]:
    """Return how far each stage is, with its name."""
    return [
        Stage(name, found.done, found.total, _status(found))
        for name, found in zip(NAMES, run.progress_by_stage(), strict=True)
    ]


def _status(stage: stages.StageProgress) -> stages.Status:
    """Return the status of a stage as a whole: the one that says most about it."""
    told = (stages.Status.FAILED, stages.Status.ABORTED, stages.Status.RUNNING)
    for status in told:
        if status in stage.counts:
            return status
    if stage.done == stage.total:
        return stages.Status.SUCCEEDED
    return stages.Status.RUNNING if stage.done else stages.Status.WAITING


def find_broken(run: StageRun) -> set[int]:
    """Return the primary keys of the pictures at which steps have failed."""
    arguments = (step.arguments for step in run.steps.failed())
    return {given["picture"] for given in arguments if "picture" in given}


def remove_picture(picture: Picture) -> None:
    """Take a picture out of its album; its files go when that is committed."""
    files = [file for file in (picture.upload, picture.image, picture.thumbnail) if file]
    picture.delete()
    for file in files:
        transaction.on_commit(lambda file=file: file.storage.delete(file.name))  # type: ignore[misc]
