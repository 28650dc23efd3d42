"""The form behind every import button."""

from __future__ import annotations

from django import forms
from django.core.validators import URLValidator

from .fetching import MAX_URL_LENGTH


class ImportForm(forms.Form):
    """The URL of a feed."""

    url = forms.CharField(
        label="Feed URL",
        max_length=MAX_URL_LENGTH,
        validators=[URLValidator(schemes=["http", "https"])],
        widget=forms.URLInput(attrs={"placeholder": "https://example.com/feed.xml"}),
    )
