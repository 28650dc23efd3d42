"""Users in the admin."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.admin import UserAdmin as DjangoUserAdmin

from .models import User


@admin.register(User)
class UserAdmin(DjangoUserAdmin):  # type: ignore[type-arg] # not generic at run time
    """Django's own, with the welcome e-mail beside each user."""

    list_display = ("username", "email", "is_welcome_email_sent", "date_joined", "is_staff")
    list_filter = ("is_welcome_email_sent", "is_staff", "is_active")
    readonly_fields = ("is_welcome_email_sent",)
    fieldsets = (
        *(DjangoUserAdmin.fieldsets or ()),
        ("E-mails", {"fields": ("is_welcome_email_sent",)}),
    )
