"""The modules of the package that can be imported here."""

import pkgutil

import django

import django_celery_safe


def find_modules() -> list[str]:
    """Return their names, without migrations; on Django 5.2 without the backend of its tasks."""
    prefix = "django_celery_safe."
    left_out = [f"{prefix}migrations."]
    if django.VERSION < (6, 0):
        left_out.append(f"{prefix}backends")
    found = pkgutil.walk_packages(django_celery_safe.__path__, prefix)
    return [one.name for one in found if not one.name.startswith(tuple(left_out))]
