"""The sign-up page."""

from __future__ import annotations

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from .forms import SignUpForm
from .registration import register


@sensitive_post_parameters("password1", "password2")
@require_http_methods(["GET", "POST"])
def sign_up(request: HttpRequest) -> HttpResponse:
    """Show the form; take a filled one."""
    form = SignUpForm(request.POST or None)
    if not form.is_valid():
        return render(request, "accounts/sign_up.html", {"form": form})
    user, _ = register(form)
    messages.success(
        request, f"Welcome, {user.get_username()}. An e-mail is on its way to {user.email}."
    )
    return redirect("accounts:sign_up")
