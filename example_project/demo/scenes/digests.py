"""A digest asked for three times at once, and one whose process is killed: one e-mail each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from io import StringIO
from time import monotonic
from typing import Any, Final

from django.conf import settings
from django.core.management import call_command
from rich.text import Text

from accounts.models import User
from demo.errors import DemoError
from demo.journal import Run
from demo.promises import Promise, counted
from demo.surroundings import Surroundings
from feeds import digest
from feeds.tasks import mail_digest

DAY: Final = "2026-11-21"
#: How often the digest of one user is asked for at once.
ASKED: Final = 3
#: Longest wait for one step of this scene, s.
STEP_WITHIN: Final = 30.0
#: How much later than the lease's end a digest may be done, s: the worker has to notice
#: the loss, and to start another child.
GRACE: Final = 5.0


def play(around: Surroundings) -> Iterator[Promise]:
    """
    Ask for one user's digest three times at once, and kill the process that mails another's.

    The mail server lets both wait. The two that come too much find the digest being
    mailed, come back when that lease is over, and return what the first one returned.
    The killed one is delivered again, finds its own dead claim, and comes back too.
    """
    around.display.scene("A digest asked for three times at once, and one whose process is killed")
    asked, killed = (
        User.objects.create_user(name, f"{name}@example.com") for name in ("gus", "hana")
    )
    for user in (asked, killed):
        around.mail.hold(user.email)
    for _ in range(ASKED):
        mail_digest.delay(asked.pk, DAY)
    _wait(around, "it is being mailed", lambda: around.mail.met_hold[asked.email] > 0)
    _wait(around, "the others step aside", lambda: _met_the_first(around, asked))
    mail_digest.delay(killed.pk, DAY)
    _wait(around, "another is being mailed", lambda: around.mail.met_hold[killed.email] > 0)
    around.display.note(
        Text("$ manage.py celery_idempotency list\n" + _celery_idempotency(), "dim")
    )

    child = around.worker.child(_record(killed)["pid"])
    child.kill()
    killed_at = monotonic()
    around.display.note(f"  SIGKILL to process {child.pid}")
    _wait(around, "mail cut off", lambda: around.mail.cut_off[killed.email] == 1)
    for user in (asked, killed):
        around.mail.release(user.email)
    _wait(around, "killed digest mailed after all", lambda: len(_done(around, killed)) == 1)
    pause = monotonic() - killed_at
    _wait(around, "all three have the result", lambda: len(_done(around, asked)) == ASKED)
    yield from _compare(around, asked, killed, pause)


def _wait(around: Surroundings, what: str, condition: Callable[[], bool]) -> None:
    around.display.progress(what, 0, 1)
    around.worker.wait_until(condition, what, seconds=STEP_WITHIN)
    around.display.progress(what, 1, 1)


def _celery_idempotency(*arguments: str) -> str:
    """Return what ``manage.py celery_idempotency list`` prints."""
    printed = StringIO()
    call_command("celery_idempotency", "list", *arguments, stdout=printed)
    return printed.getvalue()


def _record(user: User) -> dict[str, Any]:
    key = f"{mail_digest.name}:{user.pk}:{DAY}"
    records: list[dict[str, Any]] = json.loads(_celery_idempotency("--json"))
    for record in records:
        if record["key"] == key:
            return record
    raise DemoError(f"celery_idempotency shows no record {key!r}: {records}")


def _runs(around: Surroundings, user: User) -> list[Run]:
    return [run for run in around.journal.runs(mail_digest.name) if run.arguments[0] == user.pk]


def _met_the_first(around: Surroundings, user: User) -> bool:
    ids = {run.task_id for run in _runs(around, user) if run.state == "IGNORED"}
    return len(ids) == ASKED - 1


def _done(around: Surroundings, user: User) -> list[Run]:
    return [run for run in _runs(around, user) if run.state == "SUCCESS"]


def _compare(around: Surroundings, asked: User, killed: User, pause: float) -> Iterator[Promise]:
    result = {"entries": len(digest.newest_entries())}
    lease = settings.DJANGO_CELERY_SAFE["LOCK_TIMEOUT"]
    yield counted(
        f"Digest asked for {ASKED} times at once: e-mails", 1, around.mail.accepted[asked.email]
    )
    yield counted(
        "Runs of it that returned the first one's result",
        ASKED,
        sum(run.returned == result for run in _done(around, asked)),
    )
    yield counted("Digest of a killed process: e-mails", 1, around.mail.accepted[killed.email])
    yield Promise(
        f"It is mailed after the dead claim's lease ({lease:g} s)",
        expected=f"at most {lease + GRACE:g} s later",
        seen=f"{pause:.1f} s later",
        kept=0 < pause <= lease + GRACE,
    )
    yield counted("Times that its record was claimed", 2, _record(killed)["claims"])
