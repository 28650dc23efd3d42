"""The pages of albums: their list, one with its progress, and what its buttons do."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.core.files.base import ContentFile, File
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from django_celery_safe import stages
from django_celery_safe.exceptions import IllegalTransition
from django_celery_safe.models import StageRun

from . import samples
from .forms import AlbumForm
from .making import create_album, find_broken, remove_picture, stages_of
from .models import Album, Picture


@require_http_methods(["GET", "POST"])
def album_list(request: HttpRequest) -> HttpResponse:
    """Show the albums and the form of a new one; take a filled one."""
    form = AlbumForm(request.POST or None, request.FILES or None)
    if not form.is_valid():
        page = {"form": form, "albums": Album.objects.all()}
        return render(request, "albums/album_list.html", page, status=400 if form.errors else 200)
    data = form.cleaned_data
    return redirect(
        "albums:detail", create_album(data["title"], data["email"], data["pictures"]).pk
    )


@require_POST
def make_sample(request: HttpRequest) -> HttpResponse:
    """Make an album of the sample pictures; a broken one among them if that is asked for."""
    files: list[File[bytes]] = [
        ContentFile(samples.paint(name), name) for name in samples.SCENERIES
    ]
    if "broken" in request.POST:
        files.append(ContentFile(samples.cut_off("noon.jpg"), "cut-off.jpg"))
    album = create_album("From dark to light", "you@example.com", files)
    if "from_home" in request.POST:
        return redirect("home")
    return redirect("albums:detail", album.pk)


@require_GET
@never_cache
def album_detail(request: HttpRequest, pk: int) -> HttpResponse:
    """Show an album, and how far it is."""
    album = get_object_or_404(Album, pk=pk)
    page = {"album": album, "pictures": album.pictures.all(), **_progress(album.find_run())}
    return render(request, "albums/album_detail.html", page)


@require_GET
@never_cache
def progress(request: HttpRequest, pk: int) -> JsonResponse:
    """Tell the page's script how far an album is."""
    found = _progress(get_object_or_404(Album, pk=pk).find_run())
    if found["run"] is None:
        return JsonResponse({"is_over": True})
    return JsonResponse(
        {
            "status": found["run"].status,
            "is_over": found["is_over"],
            "percent": found["progress"].percent,
            "stages": [stage._asdict() for stage in found["stages"]],
        }
    )


@require_POST
def resume(request: HttpRequest, pk: int) -> HttpResponse:
    """Let a run that has failed, or was aborted, go on."""
    return _change(request, pk, StageRun.resume)


@require_POST
def abort(request: HttpRequest, pk: int) -> HttpResponse:
    """Stop what has not begun."""
    return _change(request, pk, StageRun.abort)


@require_POST
def remove(request: HttpRequest, pk: int, picture: int) -> HttpResponse:
    """Take a picture out of an album that has stopped: the broken one, say."""
    found = get_object_or_404(Picture.objects.select_related("album"), pk=picture, album=pk)
    run = found.album.find_run()
    if run is None or not _is_resumable(run):
        messages.error(request, "Pictures can be taken out only of an album that has stopped.")
    else:
        remove_picture(found)
        messages.success(request, f"{found.name} was taken out of the album.")
    return redirect("albums:detail", pk)


def _change(request: HttpRequest, pk: int, action: Any) -> HttpResponse:
    run = get_object_or_404(Album, pk=pk).find_run()
    try:
        if run is not None:
            action(run)
    except IllegalTransition as error:
        messages.error(request, str(error))
    return redirect("albums:detail", pk)


def _progress(run: StageRun | None) -> dict[str, Any]:
    if run is None:
        return {"run": None}
    return {
        "run": run,
        "progress": run.progress,
        "stages": stages_of(run),
        # Steps that ran when it was stopped may end first.
        "is_over": _is_stopped(run) and not run.steps.alive().exists(),
        "is_stopped": _is_stopped(run),
        "is_resumable": _is_resumable(run),
        "error_step": run.error_step,
        "broken": find_broken(run),
    }


def _is_stopped(run: StageRun) -> bool:
    return run.status in stages.Status.STOPPED


def _is_resumable(run: StageRun) -> bool:
    can_be = run.status in (stages.Status.FAILED, stages.Status.ABORTED)
    return can_be and not run.steps.alive().exists()
