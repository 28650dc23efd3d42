"""How somebody becomes a user, or changes a password: with an e-mail if that commits."""

from __future__ import annotations

from celery.result import AsyncResult
from django.db import transaction

from .forms import SignUpForm
from .models import User
from .tasks import send_password_changed_email, send_welcome_email


@transaction.atomic
def register(form: SignUpForm) -> tuple[User, AsyncResult[None]]:
    """
    Save a new user and welcome them by e-mail.

    The message goes to the broker when the transaction commits, the caller's
    if there is one. Rolled back, nothing is sent. Committed, it can't get lost:
    the task's ``outbox=True`` keeps it in a row until the broker has it.

    Returns:
        The user, and the announced message: its id is final already.
    """
    user = form.save()
    return user, send_welcome_email.delay_on_commit(user.pk)


@transaction.atomic
def change_password(user: User, password: str) -> AsyncResult[None]:
    """Save a new password, and tell its user by an e-mail that can't get lost."""
    user.set_password(password)
    user.save(update_fields=["password"])
    return send_password_changed_email.delay_on_commit(user.pk)
