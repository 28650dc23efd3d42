"""The start page, and the part of it that changes."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET

from .activity import activity

#: The sample feed that the start page lets one import.
SLOW_FEED = "slow-trains.atom"


@require_GET
@never_cache
def home(request: HttpRequest) -> HttpResponse:
    """Show what the site is for, and what goes on in it."""
    slow_feed = request.build_absolute_uri(reverse("feeds:slow_sample", args=[SLOW_FEED]))
    return render(request, "home.html", {"slow_feed": slow_feed, **activity()})


@require_GET
@never_cache
def show_activity(request: HttpRequest) -> HttpResponse:
    """Return what goes on, for the script of the start page."""
    return render(request, "activity.html", activity())
