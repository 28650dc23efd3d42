"""The page of feeds, its import buttons, and the sample feeds themselves."""

from __future__ import annotations

import time

from django.contrib import messages
from django.db.models import Count, Prefetch, QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_POST

from . import bundled
from .forms import ImportForm
from .models import Entry, Feed
from .tasks import import_feed

#: Entries shown of each feed.
NEWEST = 3
#: How long a slow feed takes, s: shorter than FEEDS_TIMEOUT, and long enough to watch.
PAUSE = 6


@require_GET
def feed_list(request: HttpRequest) -> HttpResponse:
    """Show the feeds, the newest entries of each, and what else could be imported."""
    return render(request, "feeds/feed_list.html", _page(request, ImportForm()))


@require_POST
def start_import(request: HttpRequest) -> HttpResponse:
    """Hand a feed's import to a worker, unless it is on its way to one."""
    form = ImportForm(request.POST)
    if not form.is_valid():
        return render(request, "feeds/feed_list.html", _page(request, form), status=400)
    url = form.cleaned_data["url"]
    sent = import_feed.delay(url)
    if sent.is_duplicate:
        messages.info(request, f"The import of {url} is on its way already, as task {sent.id}.")
    else:
        messages.success(
            request,
            f"The import of {url} was sent, as task {sent.id}. "
            f"Reload the page of feeds once a worker has done it.",
        )
    return redirect("home" if "from_home" in request.POST else "feeds:list")


@require_GET
def sample(request: HttpRequest, name: str) -> HttpResponse:
    """Serve one of the sample feeds."""
    try:
        content = bundled.read(name)
    except KeyError:
        raise Http404(f"There is no sample feed {name!r}.") from None
    return HttpResponse(content, content_type=bundled.CONTENT_TYPES[name])


@require_GET
def slow_sample(request: HttpRequest, name: str) -> HttpResponse:
    """Serve one of the sample feeds after a pause, so that its import can be watched."""
    response = sample(request, name)
    time.sleep(PAUSE)
    return response


def _page(request: HttpRequest, form: ImportForm) -> dict[str, object]:
    feeds = _feeds()
    known = {feed.url for feed in feeds}
    samples = [
        request.build_absolute_uri(reverse("feeds:sample", args=[name]))
        for name in bundled.CONTENT_TYPES
    ]
    return {
        "form": form,
        "feeds": feeds,
        "samples": [url for url in samples if url not in known],
    }


def _feeds() -> QuerySet[Feed]:
    newest = Prefetch("entries", queryset=Entry.objects.all()[:NEWEST], to_attr="newest")
    return Feed.objects.annotate(entry_count=Count("entries")).prefetch_related(newest)
