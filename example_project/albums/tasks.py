"""
How an album is made: steps in four stages, and the plan that puts them in order.

A step may run again: when its process died in it, and when a failed run is resumed. So
the steps write files under names that stay, and the e-mail goes out once.
"""

from collections.abc import Sequence
from smtplib import SMTPException
from typing import Any

from celery import shared_task
from django.conf import settings
from django.core.mail import send_mail
from django.db import OperationalError, transaction

from django_celery_safe import stages

from . import imaging
from .models import SHEET, Album

READY = """\
The album "{title}" is ready: {pictures} picture(s), and a contact sheet of them.
This e-mail comes once, whatever became of the processes that made it.
"""


class UnreadablePicture(Exception):
    """A file is not a whole picture."""


@shared_task(acks_late=True, reject_on_worker_lost=True)
@stages.step
def paint(params: dict[str, Any], name: str) -> None:
    """Paint a picture."""
    Album.objects.get(pk=params["album"]).write(name, imaging.paint(name))


@shared_task(acks_late=True, reject_on_worker_lost=True)
@stages.step
def make_thumbnail(params: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Make a picture small; return how bright it is, for the next stage."""
    album = Album.objects.get(pk=params["album"])
    if name not in album.pictures:
        return None  # it was taken out before the run was resumed
    try:
        small, brightness = imaging.make_thumbnail(album.read(name))
    except OSError as error:
        raise UnreadablePicture(f"{name} is not a whole picture ({error})") from error
    album.write(f"{name}-small", small)
    return {name: brightness}


@shared_task(acks_late=True, reject_on_worker_lost=True)
@stages.step
def make_contact_sheet(params: dict[str, Any]) -> None:
    """Put all thumbnails on one sheet, from dark to light."""
    album = Album.objects.get(pk=params["album"])
    names = sorted(album.pictures, key=params.__getitem__)
    album.write(SHEET, imaging.make_sheet(album.title, [album.read(f"{n}-small") for n in names]))


@shared_task(
    autoretry_for=(SMTPException, OSError, OperationalError),
    default_retry_delay=settings.MAIL_RETRY_DELAY,
    max_retries=120,
    acks_late=True,
    reject_on_worker_lost=True,
)
@stages.step
def notify(params: dict[str, Any]) -> None:
    """Write to whoever made the album that it is ready, unless they know."""
    with Album.do_once(params["album"], "is_announced") as album:
        if album:  # None: they know
            text = READY.format(title=album.title, pictures=len(album.pictures))
            send_mail(f"Your album {album.title}", text, None, [album.email])


@transaction.atomic
def create_album(title: str, email: str, pictures: Sequence[str]) -> Album:
    """Save an album, and begin to make it: the run begins when both are committed."""
    album = Album.objects.create(title=title, email=email, pictures=list(pictures))
    run = stages.start(
        [
            *((paint, 4, {"name": name}) for name in pictures),
            *((make_thumbnail, 3, {"name": name}) for name in pictures),
            (make_contact_sheet, 2),
            (notify, 1),
        ],
        {"album": album.pk},
        key=f"album:{album.pk}",
        name=f"make {album}",
        url=album,
    )
    album.run_id = run.pk
    album.save(update_fields=["run_id"])
    return album
