"""
The steps that make an album; :mod:`albums.making` puts them in order.

Each may be done again: when its process died in it, and when a failed run is resumed. So
they write files under names that stay, and the e-mail goes out once.
"""

from __future__ import annotations

from contextlib import ExitStack
from smtplib import SMTPException
from typing import Any

from celery import shared_task
from django.conf import settings
from django.core.mail import send_mail
from django.db import OperationalError

from django_celery_safe import SafeTask, stages

from . import imaging
from .models import Album, Picture

READY = """\
The album "{title}" is ready: {pictures} picture(s), and a contact sheet of them.
This e-mail comes once, whatever became of the processes that made it.
"""


@shared_task(base=SafeTask, acks_late=True, reject_on_worker_lost=True)
@stages.step
def fetch(params: dict[str, Any], picture: int) -> None:
    """Read an upload to its end, and keep it upright and without the camera's notes."""
    found = Picture.objects.filter(pk=picture).first()
    if found:  # None: taken out of the album, before the run was resumed
        with found.upload.open() as file:
            found.save_image(imaging.straighten(found.name, file))


@shared_task(base=SafeTask, acks_late=True, reject_on_worker_lost=True)
@stages.step
def make_thumbnail(params: dict[str, Any], picture: int) -> None:
    """Make the small one of a picture."""
    found = Picture.objects.filter(pk=picture).first()
    if found:
        with found.image.open() as file:
            found.save_thumbnail(imaging.make_thumbnail(found.name, file))


@shared_task(base=SafeTask, acks_late=True, reject_on_worker_lost=True)
@stages.step
def index(params: dict[str, Any]) -> dict[str, Any]:
    """Note each picture's colour; return their order from dark to light, for the next stage."""
    brightness = {}
    for picture in Picture.objects.filter(album=params["album"]):
        with picture.image.open() as file:
            red, green, blue = imaging.find_colour(picture.name, file)
        picture.colour = f"#{red:02x}{green:02x}{blue:02x}"
        picture.save(update_fields=["colour"])
        brightness[picture.pk] = 0.3 * red + 0.6 * green + 0.1 * blue
    return {"order": sorted(brightness, key=brightness.__getitem__)}


@shared_task(base=SafeTask, acks_late=True, reject_on_worker_lost=True)
@stages.step
def make_contact_sheet(params: dict[str, Any]) -> None:
    """Put all thumbnails on one sheet, in the order that the index found."""
    album = Album.objects.get(pk=params["album"])
    pictures = album.pictures.in_bulk(params["order"])
    with ExitStack() as opened:
        files = [
            (picture.name, opened.enter_context(picture.thumbnail.open()))
            for picture in (pictures[pk] for pk in params["order"] if pk in pictures)
        ]
        album.save_sheet(imaging.make_sheet(album.title, files))


@shared_task(
    base=SafeTask,
    autoretry_for=(SMTPException, OSError, OperationalError),
    default_retry_delay=settings.MAIL_RETRY_DELAY,
    max_retries=120,
    acks_late=True,
    reject_on_worker_lost=True,
)
@stages.step
def notify(params: dict[str, Any]) -> None:
    """Mail whoever made the album that it is ready, if they don't know yet."""
    with Album.do_once(params["album"], "is_announced") as album:
        if album:  # None: mailed already
            text = READY.format(title=album.title, pictures=album.pictures.count())
            send_mail(f"Your album {album.title}", text, None, [album.email])
