"""E-mails whose messages are delivered twice, refused, requested three times, or killed."""

from collections.abc import Iterator

from accounts.models import User
from accounts.tasks import send_welcome_email
from demo.backstage import Promise, Show, count, soon
from demo.models import Run
from digests.tasks import mail_digest

#: Users whose welcome e-mail is delivered twice, and e-mails that are refused before.
TWICE = 10
REFUSED = 5
#: How often one digest is requested.
REQUESTS = 3
DAY = "2026-11-21"


def play(show: Show) -> Iterator[Promise]:
    """Request a digest three times, kill another, and deliver messages twice meanwhile."""
    show.begin(
        "4. Done once: digests/, @idempotent; accounts/, do_once",
        "Messages are delivered twice, buttons are pressed again, e-mails are retried. Yet "
        "nobody should get an e-mail twice.",
    )
    mail = show.mail
    gus, hana = (User.objects.create_user(name, f"{name}@example.com") for name in ("gus", "hana"))
    mail.held |= {gus.email, hana.email}
    requests = [mail_digest.delay(gus.pk, DAY) for _ in range(REQUESTS)]
    runs = Run.objects.filter(task_id__in=[result.id for result in requests])
    show.wait(
        f"a digest is requested {REQUESTS} times: one run mails it, the others step aside",
        lambda: mail.waiting[gus.email] and runs.filter(state="IGNORED").count() >= REQUESTS - 1,
    )
    killed = mail_digest.delay(hana.pk, DAY)
    show.wait("the digest of somebody else is being mailed", lambda: mail.waiting[hana.email])
    show.kill(Run.objects.get(task_id=killed.id).pid, "the process that mails it")
    show.wait("its connection to the mail server is cut", lambda: not mail.waiting[hana.email])
    mail.held.clear()

    welcomes = Run.objects.filter(task=send_welcome_email.name, state="SUCCESS")
    before = welcomes.count()
    mail.refusals_left = REFUSED
    users = [User.objects.create_user(f"user{n}", f"user{n}@example.com") for n in range(TWICE)]
    for user in users:
        first = send_welcome_email.delay(user.pk)
        send_welcome_email.apply_async((user.pk,), task_id=first.id)
    show.say(f"meanwhile, {TWICE} welcome messages arrive twice, and the mail server says later")
    show.wait("the killed digest is mailed after all", lambda: mail.accepted[hana.email])
    pause = show.since_kill()
    show.wait("the welcome messages are done", lambda: welcomes.count() == before + 2 * TWICE)
    done = runs.filter(state="SUCCESS")
    show.wait("all three requests have the result", lambda: done.count() == REQUESTS)
    got_one = sum(mail.accepted[user.email] == 1 for user in users)
    results = [run.returned for run in done]
    yield count("Users who get one e-mail for two messages", TWICE, got_one)
    yield count("E-mails for a digest requested three times", 1, mail.accepted[gus.email])
    yield count("Requests that return the first one's result", 3, results.count({"entries": 6}))
    yield soon("The killed digest is mailed", pause)
    yield count("E-mails for the killed digest", 1, mail.accepted[hana.email])
