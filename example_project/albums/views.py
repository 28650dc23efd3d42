"""The page of albums, and that of one: its progress, its pictures, its buttons."""

from typing import Any, Final

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from django_celery_safe import IllegalTransition, stages
from django_celery_safe.models import StageRun

from .imaging import SCENERIES, TORN
from .models import SHEET, Album
from .tasks import create_album

#: The page's names for the stages, in their order.
NAMES: Final = ("Paint", "Thumbnails", "Contact sheet", "Notify")


@require_http_methods(["GET", "POST"])
def album_list(request: HttpRequest) -> HttpResponse:
    """Show the albums; make one, with a torn picture in it if that is asked for."""
    if request.method == "POST":
        torn = [TORN] if "torn" in request.POST else []
        return redirect(create_album("From dark to light", "you@example.com", [*SCENERIES, *torn]))
    albums = [(album, album.find_url(SHEET)) for album in Album.objects.all()]
    return render(request, "albums/album_list.html", {"albums": albums})


@require_GET
@never_cache
def album_detail(request: HttpRequest, pk: int) -> HttpResponse:
    """Show an album, and how far it is."""
    album = get_object_or_404(Album, pk=pk)
    pictures = [
        (name, album.find_url(name), album.find_url(f"{name}-small")) for name in album.pictures
    ]
    page = {"album": album, "pictures": pictures, "sheet": album.find_url(SHEET)}
    return render(request, "albums/album_detail.html", {**page, **_describe(album.find_run())})


@require_POST
def change(request: HttpRequest, pk: int, action: str) -> HttpResponse:
    """Abort a run, or resume it without the picture that is torn."""
    album = get_object_or_404(Album, pk=pk)
    run = album.find_run()
    try:
        if run and action == "abort":
            run.abort()
        elif run:
            with transaction.atomic():
                album.pictures = [name for name in album.pictures if name != TORN]
                album.save(update_fields=["pictures"])
                run.resume()
    except IllegalTransition as error:
        messages.error(request, str(error))
    return redirect(album)


def _describe(run: StageRun | None) -> dict[str, Any]:
    if run is None:
        return {}
    bars = zip(NAMES, run.progress_by_stage(), strict=True)
    return {
        "run": run,
        "percent": run.progress.percent,
        "stages": [(name, stage, _status(stage)) for name, stage in bars],
        "is_over": run.status in stages.Status.STOPPED,
        "is_resumable": run.status in (stages.Status.FAILED, stages.Status.ABORTED),
        "error_step": run.error_step,
    }


def _status(stage: stages.StageProgress) -> str:
    """Return the status of a stage as a whole: the one that says most about it."""
    for status in (stages.Status.FAILED, stages.Status.ABORTED, stages.Status.RUNNING):
        if status in stage.counts:
            return status
    return "succeeded" if stage.done == stage.total else "running" if stage.done else "waiting"
