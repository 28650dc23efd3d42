"""The sign-up page: a new user, and a welcome e-mail that is sent when the user is committed."""

from celery.result import AsyncResult
from django import forms
from django.contrib import messages
from django.contrib.auth.forms import UserCreationForm
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from .models import User
from .tasks import send_welcome_email


class SignUpForm(UserCreationForm):  # type: ignore[type-arg] # not generic at run time
    """Name, e-mail address and password of a new user."""

    email = forms.EmailField(help_text="The welcome e-mail goes here.")

    class Meta:
        model = User
        fields = ("username", "email")


@transaction.atomic
def register(form: SignUpForm) -> tuple[User, AsyncResult[None]]:
    """
    Save a new user and welcome them by e-mail.

    The message goes to the broker when the transaction commits, the caller's if there
    is one. After a rollback nothing is sent.

    Returns:
        The user, and the announced message: its id is final already.
    """
    user = form.save()
    return user, send_welcome_email.delay_on_commit(user.pk)


@sensitive_post_parameters("password1", "password2")
@require_http_methods(["GET", "POST"])
def sign_up(request: HttpRequest) -> HttpResponse:
    """Show the form; take a filled one."""
    form = SignUpForm(request.POST or None)
    if not form.is_valid():
        return render(request, "accounts/sign_up.html", {"form": form})
    user, _ = register(form)
    messages.info(
        request, f"Welcome, {user.get_username()}. An e-mail is on its way to {user.email}."
    )
    return redirect("accounts:sign_up")
