"""Feeds in the admin."""

from __future__ import annotations

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest

from .models import Entry, Feed
from .tasks import import_feed


@admin.register(Feed)
class FeedAdmin(admin.ModelAdmin):  # type: ignore[type-arg] # not generic at run time
    """Feeds, with an action that imports them anew."""

    list_display = ("title", "url", "imported_at")
    search_fields = ("title", "url")
    actions = ("import_again",)

    @admin.action(description="Import the selected feeds again")
    def import_again(self, request: HttpRequest, queryset: QuerySet[Feed]) -> None:
        """Hand the imports to a worker."""
        sent = [import_feed.delay(url) for url in queryset.values_list("url", flat=True)]
        on_their_way = sum(bool(each.is_duplicate) for each in sent)
        self.message_user(
            request,
            f"{len(sent) - on_their_way} sent, {on_their_way} on their way already.",
            messages.SUCCESS,
        )


@admin.register(Entry)
class EntryAdmin(admin.ModelAdmin):  # type: ignore[type-arg] # not generic at run time
    """The entries of all feeds."""

    list_display = ("title", "feed", "published_at")
    list_filter = ("feed",)
    search_fields = ("title", "guid")
    list_select_related = ("feed",)
