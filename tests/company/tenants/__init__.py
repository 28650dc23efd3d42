"""The app of tenants, for django-tenants."""
