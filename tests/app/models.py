"""Rows with flags of each kind."""

import uuid
from typing import Any

from django.db import models

from django_celery_safe import IdempotentMixin


class Hidden(models.Manager[Any]):
    """A default manager that shows nobody."""

    def get_queryset(self) -> models.QuerySet[Any]:
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


class Account(IdempotentMixin, models.Model):
    """A parent with a table of its own, and a flag in it."""

    email = models.EmailField(default="someone@example.org")
    is_welcome_email_sent = models.BooleanField(default=False)


class Customer(Account):
    """A child with a table of its own, and a flag in it."""

    number = models.IntegerField(default=0)
    is_invoiced = models.BooleanField(default=False)
    reminded_at = models.DateTimeField(null=True)


class Ticket(IdempotentMixin, models.Model):
    """Its primary key is a UUID, and not its first column."""

    seat = models.CharField(max_length=8, default="")
    id = models.UUIDField(primary_key=True, default=uuid.uuid4)
    is_printed = models.BooleanField(default=False)


class Voucher(IdempotentMixin, models.Model):
    """Its primary key is a text."""

    code = models.CharField(primary_key=True, max_length=20)
    is_redeemed = models.BooleanField(default=False)


class Guest(IdempotentMixin, models.Model):
    """Its base manager, which Django itself reads rows with, shows nobody either."""

    is_greeted = models.BooleanField(default=False)

    objects = Hidden()
    everyone = models.Manager["Guest"]()

    class Meta:
        base_manager_name = "objects"


class Cover(models.Model):
    """It was made by a run, which stays for as long as it does."""

    run = models.ForeignKey("django_celery_safe.StageRun", models.PROTECT, db_constraint=False)
