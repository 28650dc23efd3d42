"""The app's entry in INSTALLED_APPS."""

from django.apps import AppConfig


class AlbumsConfig(AppConfig):
    """Albums of pictures, each made by a run of stages."""

    name = "albums"
