"""The tables of locks that live in a database."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from .columns import ExactCharField, ExactTextField


class NoRows(models.Manager["Lock"]):
    """Finds no rows, so that commands that read all tables, such as dumpdata, do not fail."""

    def get_queryset(self) -> models.QuerySet[Lock]:
        return super().get_queryset().none()


class Lock(models.Model):
    """
    A lock as the admin shows it: permissions and log entries refer to this model.

    It has no table, because locks are read from their store.
    """

    name = models.TextField(_("lock"), primary_key=True)

    objects = NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view",)
        permissions = (("release_lock", "Can release lock"),)

    def __str__(self) -> str:
        return self.name


class DatabaseLock(models.Model):
    """
    A lock that lives in the database of ``LOCK_DATABASE``.

    Written by :mod:`django_celery_safe.locks.stores.database` alone. A row whose
    ``ends_at_us`` has passed is free; it stays for a while, because the fence must grow.
    """

    key = ExactCharField(primary_key=True, max_length=255)
    #: The acquisition that holds the lock; empty after a release.
    token = ExactCharField(max_length=32)
    fence = models.BigIntegerField()
    #: Name and holder as JSON; see ``encode_holder``.
    holder = ExactTextField()
    #: End of the lease by the database server's clock, µs since the epoch.
    ends_at_us = models.BigIntegerField()

    class Meta:
        verbose_name = _("row of a lock")
        verbose_name_plural = _("rows of locks")
        default_permissions = ()

    def __str__(self) -> str:
        return self.key
