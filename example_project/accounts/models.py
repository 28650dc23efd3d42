"""The site's user."""

from django.contrib.auth.models import AbstractUser
from django.db import models

from django_celery_safe import IdempotentMixin


class User(IdempotentMixin, AbstractUser):
    """A user who remembers whether the welcome e-mail was sent."""

    is_welcome_email_sent = models.BooleanField(default=False, editable=False)
