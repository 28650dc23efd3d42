"""How somebody becomes a user: one transaction, and an e-mail only if it commits."""

from __future__ import annotations

from celery.result import AsyncResult
from django.db import transaction

from .forms import SignUpForm
from .models import User
from .tasks import send_welcome_email


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
