"""E-mails sent under ``do_once`` through a server that misbehaves, and what checks them."""

import smtplib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.core.mail import EmailMessage
from django.core.mail.backends.smtp import EmailBackend

from django_celery_safe.idempotency.flags import Guarantee
from tests.faults.lab import Lab
from tests.faults.mails.oracle import (
    DROPPED,
    KILLED_LATER,
    KILLED_WAITING,
    LATE,
    ORACLE,
    UNEXPLAINED,
    History,
    Mail,
    Run,
    count_causes,
)
from tests.faults.mails.plan import DECK, EMAIL_TIMEOUT, Behaviour, Plan
from tests.faults.mails.scenario import record
from tests.faults.mails.server import HOST, MailServer
from tests.processes import Journal, wait_for

pytestmark = pytest.mark.nightly

#: A run of some fifteen seconds.
SHORT = Plan(users=40, at_most=100)

#: One in which many come at once.
CROWDED = replace(SHORT, users=24, copies=6)


def test_at_most_once_sends_nobody_two(lab: Lab) -> None:
    """No user gets a second e-mail, and a user without a fault or a kill got one."""
    history = record(replace(SHORT, guarantee="at_most_once"), lab)
    assert ORACLE.check(history) == []
    assert max(map(len, history.mails.values())) == 1


def test_at_least_once_sends_everybody_one(lab: Lab) -> None:
    """Everybody gets an e-mail, and each double has its cause outside of ``do_once``."""
    history = record(SHORT, lab)
    assert ORACLE.check(history) == []
    assert set(history.mails) == set(range(1, SHORT.users + 1))


@pytest.mark.parametrize("fault", ["plain", "flag-last"])
def test_doubles_without_a_cause_are_found(fault: str, lab: Lab) -> None:
    """A flag that is read without a lock, or set after the commit, sends for no reason."""
    assert {"unexplained doubles", "needless sends"} <= ORACLE.found(
        record(replace(CROWDED, broken=fault), lab)
    )


# The mail server, as Django's own backend meets it.


def send_mail(server: MailServer, timeout: float = EMAIL_TIMEOUT) -> None:
    """Send one e-mail."""
    # With an alias, because since Django 6.1 a backend has one.
    backend = EmailBackend(alias="default", host=HOST, port=server.port, timeout=timeout)
    backend.send_messages([EmailMessage("Welcome", "the-run", to=["1@example.org"])])


def server_that(behaviour: Behaviour, folder: Path) -> MailServer:
    """Return a mail server that always does the same."""
    return MailServer(replace(SHORT, deck=((behaviour, 1),)), Journal(folder / "server.jsonl"))


@pytest.mark.parametrize(
    ("behaviour", "announced"),
    [(Behaviour.ACCEPT, 0), (Behaviour.HOLD_ANSWER, 1), (Behaviour.ANNOUNCE, 1)],
)
def test_the_server_notes_what_it_took(
    behaviour: Behaviour, announced: int, tmp_path: Path
) -> None:
    """An e-mail that was taken is noted by its body and recipient, and announced if planned."""
    with server_that(behaviour, tmp_path) as server:
        send_mail(server)
        assert server.journal.count("took", to="1@example.org", run="the-run", number=0) == 1
        wait_for(lambda: server.announced.qsize() == announced)


@pytest.mark.parametrize(
    ("behaviour", "error", "taken"),
    [
        (Behaviour.REFUSE_CONNECTION, smtplib.SMTPConnectError, 0),
        (Behaviour.REFUSE_RECIPIENT, smtplib.SMTPRecipientsRefused, 0),
        (Behaviour.HANG, smtplib.SMTPServerDisconnected, 0),
        (Behaviour.DROP_MAIL, smtplib.SMTPServerDisconnected, 0),
        (Behaviour.DROP_ANSWER, smtplib.SMTPServerDisconnected, 1),
    ],
)
def test_the_server_misbehaves(
    behaviour: Behaviour, error: type[Exception], taken: int, tmp_path: Path
) -> None:
    """A fault is an error for the client, and only of a dropped answer the e-mail is there."""
    with server_that(behaviour, tmp_path) as server:
        with pytest.raises(error):
            send_mail(server, timeout=0.3 if behaviour is Behaviour.HANG else EMAIL_TIMEOUT)
        # The system connects for the server, which may notice it later.
        wait_for(lambda: server.journal.count("connection", behaviour=behaviour))
        assert server.journal.count("connection", behaviour=behaviour) == 1
        assert server.journal.count("took") == taken


def test_the_server_goes_away_and_comes_back(tmp_path: Path) -> None:
    """For a while connections are refused, then the server listens on the same port again."""
    away_first = [Behaviour.GO_AWAY, Behaviour.ACCEPT]
    plan = replace(SHORT, deck=tuple((behaviour, 1) for behaviour in away_first))
    plans = [replace(plan, seed=seed) for seed in range(20)]
    plan = next(one for one in plans if [one.behaviour(0), one.behaviour(1)] == away_first)
    with MailServer(plan, Journal(tmp_path / "server.jsonl"), away=2) as server:
        with pytest.raises((smtplib.SMTPServerDisconnected, ConnectionResetError)):
            send_mail(server)
        with pytest.raises(ConnectionRefusedError):
            send_mail(server)
        wait_for(lambda: can_send(server))
        assert server.journal.count("took") == 1


def can_send(server: MailServer) -> bool:
    """Try to send."""
    try:
        send_mail(server)
    except OSError:
        return False
    return True


def test_each_deal_has_the_whole_deck() -> None:
    """In so many connections everything happens as often as planned, in an order by the seed."""
    size = sum(DECK.values())
    deals = [
        [replace(SHORT, seed=seed).behaviour(number + first) for number in range(size)]
        for seed, first in [(0, 0), (0, size), (1, 0)]
    ]
    assert all(Counter(deal) == DECK for deal in deals)
    assert deals[0] != deals[1] != deals[2] != deals[0]


# Histories written by hand; times are small numbers.

CALM = replace(SHORT, users=1, deck=())


def good_run(name: str = "1-a", begun: int = 11, **changes: Any) -> Run:
    """Return a run of user 1 that sent well, with changes."""
    run = Run(name, 1, begun - 1, begun, answered=begun + 2, over=begun + 4)
    return replace(run, **changes)


def failed_run(name: str, error: str = "SMTPServerDisconnected", took: int = 2) -> Run:
    """Return a run of user 1 whose send failed after so long."""
    return Run(name, 1, 10, 11, failed=11 + took, over=12 + took, error=error, raised=error)


def killed_run(name: str, **changes: Any) -> Run:
    """Return a run of user 1 that never ended."""
    return replace(good_run(name, answered=None, over=None), **changes)


def history_of(
    *runs: Run,
    mails: dict[str, str] | None = None,
    guarantee: Guarantee = "at_least_once",
    **changes: Any,
) -> History:
    """
    Return the history of user 1.

    Args:
        mails: Runs whose e-mails were taken, and the server's answers; unset: all runs.
    """
    history = History(replace(CALM, guarantee=guarantee), flags={1: True})
    history.runs = {run.id: run for run in runs}
    taken = dict.fromkeys(history.runs, str(Behaviour.ACCEPT)) if mails is None else mails
    if taken:
        history.mails[1] = [Mail(12, run, behaviour) for run, behaviour in taken.items()]
    return replace(history, **changes)


def wrong(history: History) -> set[str]:
    """Return what was found, but for that little happened."""
    return ORACLE.found(history) - {"too little"}


LATER = good_run("2-b", begun=10**10)
DROP = {"1-a": str(Behaviour.DROP_ANSWER), "2-b": str(Behaviour.ACCEPT)}
ONE = {"1-a": str(Behaviour.ACCEPT)}
PATIENCE = int(EMAIL_TIMEOUT * 1e9)


def test_one_good_mail_is_in_order() -> None:
    """A user who got one e-mail in one run is in order."""
    for guarantee in ("at_least_once", "at_most_once"):
        assert wrong(history_of(good_run(), guarantee=guarantee)) == set()


@pytest.mark.parametrize(
    ("cause", "history"),
    [
        (DROPPED, history_of(failed_run("1-a"), LATER, mails=DROP)),
        (KILLED_WAITING, history_of(killed_run("1-a"), LATER, killed={1: 13})),
        (KILLED_LATER, history_of(killed_run("1-a", answered=13), LATER, killed={1: 14})),
        (LATE, history_of(failed_run("1-a", took=PATIENCE), LATER)),
    ],
)
def test_a_double_with_a_cause_is_in_order(cause: str, history: History) -> None:
    """Under at_least_once a double has one of four causes; under at_most_once none helps."""
    assert wrong(history) == set()
    assert count_causes(history) == {cause: 1}
    history.plan = replace(history.plan, guarantee="at_most_once")
    assert wrong(history) == {"second mails"}


@pytest.mark.parametrize(
    "history",
    [
        # Answered, and it lived on.
        history_of(good_run(), LATER),
        history_of(good_run(), LATER, mails=DROP),
        # Killed, but before that run or after it.
        history_of(good_run(), LATER, killed={1: 9}),
        history_of(good_run(), LATER, killed={1: 99}),
        history_of(killed_run("1-a"), LATER, killed={1: 9}),
        # Another process was killed.
        history_of(killed_run("1-a"), LATER, killed={2: 13}),
        # It failed for another reason, or too soon.
        history_of(failed_run("1-a", "SMTPConnectError", took=PATIENCE), LATER),
        history_of(failed_run("1-a", took=PATIENCE - 1), LATER),
        # Three e-mails, one with a cause.
        history_of(good_run("3-c"), failed_run("1-a"), LATER, mails={**DROP, "3-c": "accepted"}),
        # An e-mail of an unknown run.
        history_of(LATER, mails={"9-z": "accepted", "2-b": "accepted"}),
    ],
)
def test_a_double_without_a_cause_is_found(history: History) -> None:
    """A cause counts only if the witnesses of just that e-mail tell of it."""
    assert "unexplained doubles" in wrong(history)
    assert count_causes(history)[UNEXPLAINED] == 1


def test_a_needless_send_is_found() -> None:
    """No run may begin to send after a good one began, even if its send fails."""
    late = replace(failed_run("2-b"), begun=12)
    assert wrong(history_of(good_run(), late, mails=ONE)) == {"needless sends"}
    early = replace(late, begun=10)
    assert wrong(history_of(good_run(), early, mails=ONE)) == set()


def test_a_missing_mail_is_found() -> None:
    """Under at_least_once everybody must get one, under at_most_once who met no fault."""
    unlucky = history_of(failed_run("1-a"), mails={})
    assert wrong(unlucky) == {"missing mails"}
    unlucky.plan = replace(unlucky.plan, guarantee="at_most_once")
    assert wrong(unlucky) == set()
    killed = history_of(killed_run("1-a"), mails={}, guarantee="at_most_once", killed={1: 13})
    assert wrong(killed) == set()
    skipped = history_of(Run("1-a", 1, 10, over=11), mails={}, guarantee="at_most_once")
    assert wrong(skipped) == {"missing mails"}


@pytest.mark.parametrize(
    ("history", "name"),
    [
        (history_of(good_run(), flags={1: False}), "unset flags"),
        (history_of(good_run(), messages=["an-id"]), "leftovers"),
        (history_of(good_run(), Run("2-b", 1, 20), mails=ONE), "errors"),
        (history_of(good_run(), Run("2-b", 1, 20, over=21, raised="Error"), mails=ONE), "errors"),
        (
            history_of(LATER, replace(failed_run("1-a"), raised="Error"), mails=DROP),
            "errors",
        ),
    ],
)
def test_each_other_check_finds_its_violation(history: History, name: str) -> None:
    """A history with one thing wrong is found by that thing's name."""
    assert wrong(history) == {name}


def test_an_empty_history_proves_nothing() -> None:
    """A run in which nothing happened is rejected, with what is missing."""
    for guarantee, more in [
        ("at_least_once", ["doubles after a kill", f"doubles: {DROPPED}"]),
        ("at_most_once", ["users without an e-mail"]),
    ]:
        plan = replace(SHORT, guarantee=guarantee)
        missing = " ".join(violation.text for violation in ORACLE.check(History(plan)))
        for name in [*more, "users who met no fault", "children killed at random", *DECK]:
            assert f"{name}: 0" in missing
