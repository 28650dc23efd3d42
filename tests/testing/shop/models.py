"""Its only table."""

from django.db import models

from django_celery_safe import IdempotentMixin


class Customer(IdempotentMixin, models.Model):
    """Somebody who signs up."""

    mails = models.IntegerField(default=0)
    is_welcome_email_sent = models.BooleanField(default=False)
