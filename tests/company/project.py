"""The Celery app of the project, which each of its processes has, and its views: none."""

from django.apps import AppConfig
from django.conf import settings
from django.utils.module_loading import import_string

app = import_string(settings.HERE.app)("company", **settings.HERE.app_options)
app.config_from_object("django.conf:settings", namespace="CELERY")
app.conf.imports = ["tests.company.tasks"]

urlpatterns: list[object] = []


class CompanyConfig(AppConfig):
    """The project's one app."""

    name = "tests.company"
    default_auto_field = "django.db.models.BigAutoField"
