"""Albums in the admin."""

from __future__ import annotations

from django.contrib import admin

from .models import Album


@admin.register(Album)
class AlbumAdmin(admin.ModelAdmin):  # type: ignore[type-arg] # not generic at run time
    """Albums; their own pages show how far their runs are."""

    list_display = ("title", "email", "created_at", "is_announced")
    search_fields = ("title", "email")
    readonly_fields = ("run_id", "sheet", "is_announced")
