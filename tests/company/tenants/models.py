"""Tenants, each with a schema."""

from django_tenants.models import DomainMixin, TenantMixin


class Tenant(TenantMixin):
    """A tenant."""


class Domain(DomainMixin):
    """A domain of a tenant."""
