"""An album in four stages: a process is killed in the second; another run fails and goes on."""

import re
from collections.abc import Iterator

from django.core.files.storage import default_storage
from django.db import transaction
from django.test import Client
from django.urls import reverse

from albums.imaging import SCENERIES, TORN
from albums.models import Album
from albums.tasks import create_album
from demo.backstage import DemoError, Promise, Show, count, soon
from django_celery_safe import stages
from django_celery_safe.models import StageRun


def play(show: Show) -> Iterator[Promise]:
    """Kill the process of one thumbnail while the others are made; then let a picture be torn."""
    with show.relay():
        yield from _play(show)


def _play(show: Show) -> Iterator[Promise]:
    show.begin(
        "5. In stages: albums/, stages.start, @stages.step",
        "A contact sheet needs all thumbnails, which are made side by side. A step that dies "
        "or fails must neither stop the run for ever nor start the next stage twice.",
    )
    with transaction.atomic():
        album = create_album("Dark to light", "ivy@example.com", list(SCENERIES))
        # In time, because the run begins when this commits.
        hold = default_storage.hold(album.path("noon-small"))  # type: ignore[attr-defined]
    run = find_run(album)
    show.wait("all steps of two stages but one are done", lambda: run.progress.done == 15)
    show.kill_named("celery_stages", "show", str(run.pk))
    hold.unlink()
    show.wait("its step begins again, and succeeds", lambda: run.progress.done > 15)
    pause = show.since_kill()
    wait_for_the_end(show, album, "the album is ready")
    again = re.findall(r"Task albums\.tasks\.\w+\[\S+\] is sent again: its process died", show.log)
    yield count("Steps that succeeded", 18, run.progress.done)
    yield soon("The killed step runs again", pause)
    yield count("Steps that are sent again: only the killed one", 1, len(again))
    yield count("E-mails that the album is ready", 1, show.mail.accepted[album.email])

    album = create_album("With a torn one", "joe@example.com", ["dunes", "noon", TORN])
    wait_for_the_end(show, album, "another album fails at a torn picture")
    page = Client().get(album.get_absolute_url()).text
    named = "yes" if "torn is not a whole picture" in page else "no"
    mailed = show.mail.accepted[album.email]
    Client().post(reverse("albums:resume", args=[album.pk]))
    wait_for_the_end(show, album, "it is resumed without that picture, and is ready")
    yield count("The album's page names the torn picture", "yes", named)
    yield count(
        "E-mails while it has failed, and after Resume",
        "0, 1",
        f"{mailed}, {show.mail.accepted[album.email]}",
    )


def find_run(album: Album) -> StageRun:
    """Return the run that makes an album, as it is now."""
    run = album.find_run()
    if run is None:
        raise DemoError(f"Album {album.pk} has no run.")
    return run


def wait_for_the_end(show: Show, album: Album, what: str) -> None:
    """Wait until an album's run has ended, successfully or not, and none of its steps runs."""

    def is_over() -> bool:
        run = find_run(album)
        is_working = run.steps.filter(status=stages.Status.RUNNING).exists()
        return run.status in stages.Status.STOPPED and not is_working

    show.wait(what, is_over)
