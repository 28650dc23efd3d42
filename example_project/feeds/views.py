"""The page of feeds with its import buttons, and sample feeds to try them on."""

import time
from pathlib import Path
from typing import Final

from django import forms
from django.contrib import messages
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods

from .fetching import MAX_LENGTH
from .models import Feed
from .tasks import import_feed

FOLDER: Final = Path(__file__).parent / "samples"
#: The sample feeds, which come with the site, so that there is something to import offline.
SAMPLES: Final = sorted(path.name for path in FOLDER.iterdir())
#: How long a sample feed takes, s: long enough to press a button again meanwhile.
PAUSE: Final = 6


class ImportForm(forms.Form):
    """The URL of a feed."""

    url = forms.URLField(label="Feed URL", max_length=MAX_LENGTH, assume_scheme="https")


@require_http_methods(["GET", "POST"])
def feed_list(request: HttpRequest) -> HttpResponse:
    """Show the feeds; send the import of one, unless its import waits or runs already."""
    form = ImportForm(request.POST or None)
    if not form.is_valid():
        samples = [reverse("feeds:sample", args=[name]) for name in SAMPLES]
        page = {
            "form": form,
            "feeds": Feed.objects.prefetch_related("entries"),
            "samples": [request.build_absolute_uri(path) for path in samples],
        }
        return render(request, "feeds/feed_list.html", page, status=400 if form.errors else 200)
    url = form.cleaned_data["url"]
    sent = import_feed.delay(url)
    outcome = "is on its way already" if sent.is_duplicate else "was sent"
    messages.info(request, f"The import of {url} {outcome}, as task {sent.id}.")
    return redirect("feeds:list")


@require_GET
def sample(request: HttpRequest, name: str) -> HttpResponse:
    """Serve a sample feed, slowly, so that its import can be watched."""
    if name not in SAMPLES:
        raise Http404(f"There is no sample feed {name!r}.")
    time.sleep(PAUSE)
    return HttpResponse((FOLDER / name).read_bytes(), content_type="application/xml")
