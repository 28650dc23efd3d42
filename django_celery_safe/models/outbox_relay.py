"""The relays of an outbox."""

from __future__ import annotations

from django.db import models


class OutboxRelay(models.Model):
    """The relays' heartbeat: one row that every relay updates."""

    host = models.CharField(max_length=255)
    pid = models.IntegerField()
    seen_at = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.host} pid {self.pid}"
