"""Sign-ups that commit, roll back, or are killed before their commit."""

from collections.abc import Iterator

from django.db import transaction

from accounts.models import User
from accounts.tasks import send_welcome_email
from accounts.views import SignUpForm, register
from demo.backstage import DemoError, Promise, Show, count
from demo.models import Run

SIGN_UPS = 20
#: Every fifth sign-up rolls back.
COMMITTED = 16


class PageFailed(Exception):
    """Stands for whatever goes wrong in a view after the user was saved."""


def play(show: Show) -> Iterator[Promise]:
    """Let twenty people sign up, four of them in vain; kill the process of another one."""
    show.begin(
        "2. Sent when it commits: accounts/, delay_on_commit",
        "A welcome e-mail must not be sent before its user is saved, nor if the page fails "
        "and the user is rolled back.",
    )
    announced = [sign_up(f"guest{n}", fails=n % 5 == 4) for n in range(SIGN_UPS)]
    committed = {announced[n] for n in range(SIGN_UPS) if n % 5 != 4}
    show.say(f"{SIGN_UPS} people sign up; {SIGN_UPS - COMMITTED} of the pages fail and roll back")
    show.wait("the welcome e-mails are sent", lambda: _mailed(show, "guest") >= COMMITTED)
    show.kill_senders(
        ("sign-up", "cleo"), when="uncommitted", which="cleo's web process, before its commit"
    )
    left = f"{User.objects.filter(username='cleo').count()}, {_mailed(show, 'cleo')}"
    committed.add(sign_up("cleo", fails=False))
    show.wait("cleo signs up again, and gets the e-mail", lambda: _mailed(show, "cleo"))
    sent = set(Run.objects.filter(task=send_welcome_email.name).values_list("task_id", flat=True))
    yield count(
        f"E-mails for the {COMMITTED} sign-ups that commit", COMMITTED, _mailed(show, "guest")
    )
    yield count("Ids known before the commit, and sent after it", 17, len(sent & committed))
    yield count("Messages of rollbacks and of the killed process", 0, len(sent - committed))
    yield count("Killed before its commit: users, e-mails", "0, 0", left)
    yield count("E-mails after signing up again", 1, _mailed(show, "cleo"))


def sign_up(name: str, *, fails: bool) -> str:
    """Sign somebody up by the site's form; return the announced id of the welcome e-mail's task."""
    passwords = {"password1": f"passphrase of {name}", "password2": f"passphrase of {name}"}
    form = SignUpForm({"username": name, "email": f"{name}@example.com", **passwords})
    if not form.is_valid():
        raise DemoError(f"The sign-up form refused {name}: {form.errors.as_text()}")
    try:
        with transaction.atomic():
            _, message = register(form)
            if fails:
                raise PageFailed
    except PageFailed:
        pass
    return str(message.id)


def _mailed(show: Show, name: str) -> int:
    return sum(n for address, n in show.mail.accepted.items() if address.startswith(name))
