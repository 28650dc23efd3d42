"""The app's entry in INSTALLED_APPS."""

from django.apps import AppConfig


class FeedsConfig(AppConfig):
    """RSS and Atom feeds, imported one at a time."""

    name = "feeds"
