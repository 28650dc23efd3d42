"""The form of the sign-up page."""

from __future__ import annotations

from django import forms
from django.contrib.auth.forms import UserCreationForm

from .models import User


class SignUpForm(UserCreationForm):  # type: ignore[type-arg] # not generic at run time
    """Name, e-mail address and password of a new user."""

    email = forms.EmailField(help_text="The welcome e-mail goes here.")

    class Meta:
        model = User
        fields = ("username", "email")
