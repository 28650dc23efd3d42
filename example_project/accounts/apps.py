"""The app's entry in INSTALLED_APPS."""

from django.apps import AppConfig


class AccountsConfig(AppConfig):
    """People who sign up, and the e-mail that welcomes them."""

    name = "accounts"
