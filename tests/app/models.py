"""Rows with flags of each kind."""

from django.db import models

from django_celery_safe import IdempotentMixin


class Hidden(models.Manager["Person"]):
    """A default manager that shows nobody."""

    def get_queryset(self) -> models.QuerySet["Person"]:
        """Return no row."""
        return super().get_queryset().none()


class Person(IdempotentMixin, models.Model):
    """Somebody to whom things happen once."""

    email = models.EmailField(default="someone@example.org")
    is_welcome_email_sent = models.BooleanField(default=False)
    is_badge_printed = models.BooleanField(default=False)
    invited_at = models.DateTimeField(null=True)
    joined_at = models.DateTimeField(auto_now_add=True)

    objects = Hidden()
    everyone = models.Manager["Person"]()
