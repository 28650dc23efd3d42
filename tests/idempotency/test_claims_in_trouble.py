"""Claims whose holder dies or stands still, and whose database is slow, gone and back."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery.exceptions import Reject, SoftTimeLimitExceeded
from django.db import DatabaseError, connections, transaction

from django_celery_safe import AlreadyClaimed, ClaimLost, ConfigurationError, idempotent
from django_celery_safe.databases import Now
from django_celery_safe.events import CLAIM_FAILED
from django_celery_safe.models import IdempotencyRecord
from django_celery_safe.signals import claim_lost
from tests.app.models import Person
from tests.background import elsewhere
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.idempotency.test_claims import (
    KEY,
    LONG,
    begin,
    begin_and_finish,
    do,
    enter,
    follow,
    record_of,
    result_of_repeat,
)
from tests.idempotency.test_flags_race import end_sessions, isolate
from tests.locks.lines import Line, line_to
from tests.processes import FunctionProcess, start_in_process, tell, wait_for
from tests.sending.carrying import Carried
from tests.sending.conftest import hearing
from tests.sending.test_relay_trouble import taking_no_writes
from tests.servers import PostgresServer
from tests.servers.databases import DatabaseKind, registered, until_somebody_waits
from tests.statements import at_statement


def end_lease(alias: str) -> None:
    """Let the lease of the record be over."""
    past = Now() - timedelta(seconds=1)
    assert IdempotencyRecord.objects.using(alias).update(ends_at=past) == 1


def try_once(alias: str, result: Any) -> bool:
    """Do it unless it is being done; tell whether it was done here."""
    with suppress(AlreadyClaimed), idempotent(KEY, using=alias) as claim:
        if claim:
            claim.finish(result)
            return True
    return False


# The holder.


def hold(alias: str, gate: Path, way: str) -> str:
    """Claim, tell so, and finish when the gate opens; return how that ended."""
    with hearing(CLAIM_FAILED, claim_lost) as told:
        try:
            with idempotent(KEY, using=alias) as claim:
                assert claim
                if way == "finish":
                    _pass(gate)
                    claim.finish("of the first")
                    return "done"
                if way == "atomic":
                    # Not before: on SQLite it would keep all others from writing.
                    _pass(gate)
                else:
                    end_lease(alias)
                with transaction.atomic(using=alias):
                    Person.everyone.using(alias).create(pk=1)
                    claim.finish("of the first")
                    if way != "atomic":
                        _pass(gate)
                    if way == "roll back":
                        raise ValueError(way)
        except (ClaimLost, ValueError) as error:
            ended = type(error).__name__
            if isinstance(error, ClaimLost):
                # It is the renewing thread that tells so, if that was the first to know.
                wait_for(lambda: told, 10, "the loss was not told")
        else:
            ended = "done"
    names = {CLAIM_FAILED: "failed", claim_lost: "lost"}
    return " ".join([ended, *sorted({names[event["signal"]] for event in told})])


def _pass(gate: Path) -> None:
    tell("inside")
    wait_for(gate.exists, 120)


@pytest.mark.sql
@pytest.mark.parametrize("way", ["finish", "commit"])
def test_a_killed_holder_is_followed_after_its_lease(
    way: str, db_alias: str, tmp_path: Path
) -> None:
    """
    The work of a killed process is free when its lease is over, and not before.

    If it is killed between finish() and the commit, neither its rows nor its end are there.
    """
    with start_in_process(hold, db_alias, tmp_path / "gate", way) as process:
        process.receive()
        process.kill()
    assert not Person.everyone.using(db_alias).exists()
    assert way == "commit" or not try_once(db_alias, "too early")
    end_lease(db_alias)
    assert try_once(db_alias, "of the second")
    assert record_of(db_alias).claims == 2
    assert result_of_repeat(db_alias) == "of the second"


@pytest.mark.parametrize(("way", "is_done"), [("finish", True), ("atomic", False)])
def test_a_holder_that_was_paused_can_not_finish(
    way: str, is_done: bool, db_alias: str, tmp_path: Path
) -> None:
    """Stopped past its lease and followed by another, it gets ClaimLost, and writes nothing."""
    with (
        paused(db_alias, tmp_path / "gate", way) as process,
        idempotent(KEY, using=db_alias) as claim,
    ):
        assert claim
        if is_done:
            claim.finish("of the second")
        process.resume()
        assert process.result() == "ClaimLost lost"
        if not is_done:
            claim.finish("of the second")
    assert not Person.everyone.using(db_alias).exists()
    assert result_of_repeat(db_alias) == "of the second"


def test_a_holder_that_nobody_followed_finishes(db_alias: str, tmp_path: Path) -> None:
    """Stopped past its lease, but still the last who claimed, it is done by it."""
    with paused(db_alias, tmp_path / "gate", "atomic") as process:
        process.resume()
        assert process.result() == "done"
    assert result_of_repeat(db_alias) == "of the first"


@contextmanager
def paused(alias: str, gate: Path, way: str) -> Iterator[FunctionProcess]:
    """Have a process stopped inside its claim, past its lease."""
    with start_in_process(hold, alias, gate, way) as process:
        process.receive()
        process.pause()
        gate.touch()
        end_lease(alias)
        yield process


@pytest.mark.parametrize(
    ("way", "ends", "is_done_by"),
    [
        ("commit", {"done"}, "first"),
        ("roll back", {"ValueError lost", "ValueError failed"}, "second"),
    ],
)
def test_who_comes_after_finish_waits_for_the_end_of_the_transaction(
    way: str, ends: set[str], is_done_by: str, postgres_alias: str, tmp_path: Path
) -> None:
    """
    However long it stays open after finish(), its commit decides for others.

    After a rollback one that waited at the row has it at once, and the first is told what
    became of it.
    """
    gate = tmp_path / "gate"
    with start_in_process(hold, postgres_alias, gate, way) as process:
        process.receive()
        with start_in_process(try_once, postgres_alias, "of the second") as second:
            until_somebody_waits(postgres_alias)
            gate.touch()
            assert process.result() in ends
            assert second.result() is (is_done_by == "second")
    assert result_of_repeat(postgres_alias) == f"of the {is_done_by}"


@pytest.mark.sql
@pytest.mark.parametrize(
    ("step", "ending", "level"),
    [
        (begin, None, "SERIALIZABLE"),
        (begin_and_finish, "stored", "REPEATABLE_READ"),
        (follow, None, "REPEATABLE_READ"),
    ],
)
def test_stricter_isolation_makes_no_other_errors(
    step: Callable[[str], None],
    ending: str | None,
    level: str,
    make_database: MakeDatabase,
    db_kind: DatabaseKind,
) -> None:
    """The second of two claims at one moment reports the other's claim or result."""
    is_mariadb = db_kind == "mariadb"
    alias = make_database("mariadb-repeatable" if is_mariadb else "postgres")
    if not is_mariadb:
        isolate(alias, level)
    if step is follow:
        begin(alias, lease=-LONG)
    with coming_first(alias, step):
        if ending is None:
            with pytest.raises(AlreadyClaimed):
                enter(using=alias)
        else:
            assert result_of_repeat(alias) == ending


@contextmanager
def coming_first(
    alias: str, step: Callable[[str], object], waited: Callable[[], object] = bool
) -> Iterator[None]:
    """Have taken a step in another transaction, which ends when somebody waits for it."""
    inside = threading.Event()

    def come_first() -> None:
        with transaction.atomic(using=alias):
            step(alias)
            inside.set()
            until_somebody_waits(alias)
            waited()

    first = elsewhere(alias, come_first)
    assert inside.wait(30)
    yield
    first.result()


def test_a_time_limit_during_the_claim_leaves_as_one(postgres_alias: str) -> None:
    """Not as the error of the connection that it cut off, which can be used afterwards."""
    has_left = threading.Event()

    def end(number: int, frame: object) -> None:
        raise SoftTimeLimitExceeded

    def limit() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert has_left.wait(30)
        transaction.set_rollback(True, using=postgres_alias)

    def follow_it() -> bool:
        # The server may have gone on with the claim; then a dead one is there for its lease.
        IdempotencyRecord.objects.using(postgres_alias).update(ends_at=Now() - LONG)
        return try_once(postgres_alias, "of the second")

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with coming_first(postgres_alias, begin, waited=limit):
            with pytest.raises(SoftTimeLimitExceeded):
                enter(using=postgres_alias)
            has_left.set()
    finally:
        signal.signal(signal.SIGUSR1, before)
    wait_for(follow_it, 30, "it can't be done")
    assert result_of_repeat(postgres_alias) == "of the second"


@pytest.mark.parametrize("way", ["end", "raise", "finish"])
def test_a_forked_child_leaves_the_claim_to_its_parent(way: str, postgres_alias: str) -> None:
    """However a child leaves the block that it was forked in, only its parent ends the claim."""
    with start_in_process(fork_inside, postgres_alias, way) as process:
        # The child's exit status, and the record after it.
        assert process.result() == (0, "running")
    assert result_of_repeat(postgres_alias) == "of the parent"
    assert record_of(postgres_alias).claims == 1


def fork_inside(alias: str, way: str) -> tuple[int, str]:
    """Fork in the block, have the child leave it, and finish when the child is gone."""
    child, left_by = -1, ""
    with hearing(CLAIM_FAILED, claim_lost) as told:
        try:
            with idempotent(KEY, using=alias) as claim:
                child = os.fork()
                if child:
                    _, status = os.waitpid(child, 0)
                    state = record_of(alias).state
                    claim.finish("of the parent")
                elif way == "raise":
                    raise ValueError(way)
                elif way == "finish":
                    claim.finish("of the child")
            left_by = "end"
        except ValueError:
            left_by = "raise"
        except ConfigurationError as error:
            left_by = "finish" if "the process that forked this one" in str(error) else ""
        finally:
            if child == 0:
                os._exit(0 if left_by == way and not told else 1)
    assert told == []
    return os.waitstatus_to_exitcode(status), state


# The database.


def test_a_database_that_can_only_be_read_for_a_while_is_asked_again(
    postgres_alias: str, postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The statement is repeated, as after a failover to a server that will soon take writes."""
    outage = ExitStack()

    def let_write_later() -> None:
        wait_for(lambda: "retrying" in caplog.text, 30, "it was not tried again")
        outage.close()
        is_finished = finished.wait(30)
        if not is_finished:
            end_sessions(postgres_server, postgres_alias)
        assert is_finished, "it kept to a session that can only read"

    finished = threading.Event()
    # The session that can only read is not given up because of its age.
    connections.settings[postgres_alias]["CONN_MAX_AGE"] = None
    with ThreadPoolExecutor(1) as pool, idempotent(KEY, using=postgres_alias, timeout=60) as claim:
        outage.enter_context(taking_no_writes(postgres_alias, postgres_server))
        writing = pool.submit(let_write_later)
        claim.finish("stored")
        finished.set()
        writing.result()
    assert "read-only transaction" in caplog.text
    assert result_of_repeat(postgres_alias) == "stored"
    assert record_of(postgres_alias).claims == 1


@pytest.mark.parametrize("error", [None, ValueError("of the work")])
def test_a_database_that_stays_away_is_an_error(
    error: Exception | None, postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """Beyond the lease that, or the work's own error, reaches the caller; no loss is reported."""
    with (
        ExitStack() as outage,
        hearing(claim_lost, CLAIM_FAILED) as told,
        pytest.raises(type(error) if error else DatabaseError),
        idempotent(KEY, using=postgres_alias, timeout=1) as claim,
    ):
        outage.enter_context(postgres_server.stopped())
        if error:
            raise error
        claim.finish("stored")
    assert told == []
    connections[postgres_alias].close_if_unusable_or_obsolete()  # as Celery and Django do
    assert record_of(postgres_alias).state == IdempotencyRecord.State.RUNNING
    # A renewal that was under way may have been written since the server is back.
    wait_for(lambda: try_once(postgres_alias, "of the second"), 30, "the lease does not end")


def test_a_database_that_is_away_begins_nothing(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """Without the record nothing is done: the database's own error reaches the caller."""
    connections[postgres_alias].close()
    with postgres_server.stopped(), pytest.raises(DatabaseError):
        enter(using=postgres_alias)
    assert do(using=postgres_alias)


def test_a_file_that_is_locked_for_long_does_not_undo_the_work(
    sqlite_alias: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On SQLite "database is locked" is waited for as long as the lease lasts."""
    connections.settings[sqlite_alias]["OPTIONS"]["timeout"] = 0.1
    is_locked = threading.Event()

    def write() -> None:
        with transaction.atomic(using=sqlite_alias):
            Person.everyone.using(sqlite_alias).create(pk=1)
            is_locked.set()
            wait_for(lambda: "retrying" in caplog.text, 30, "it was not tried again")

    with idempotent(KEY, using=sqlite_alias) as claim:
        writing = elsewhere(sqlite_alias, write)
        assert is_locked.wait(30)
        claim.finish("stored")
        writing.result()
    assert result_of_repeat(sqlite_alias) == "stored"


@pytest.fixture
def gateway(
    postgres_alias: str, postgres_server: PostgresServer
) -> Iterator[tuple[str, str, Line]]:
    """The alias of a database, another one that leads there by a line, and that line."""
    direct = connections.settings[postgres_alias]
    names = ("ENGINE", "NAME", "USER")
    with line_to(postgres_server.port) as line:
        settings = {name: direct[name] for name in names}
        settings |= {"HOST": "127.0.0.1", "PORT": str(line.port)}
        with registered("through-gateway", settings):
            yield postgres_alias, "through-gateway", line


def test_an_answer_that_gets_lost_does_not_lose_the_claim(gateway: tuple[str, str, Line]) -> None:
    """The record was finished and the answer got lost: a second look finds that it was us."""
    direct, through, way = gateway
    with hearing(claim_lost) as told, idempotent(KEY, using=through) as claim:
        assert claim
        way.cut_after = 0
        claim.finish("stored")
        assert way.cut_after is None
    assert told == []
    assert result_of_repeat(direct) == "stored"


def test_a_failure_whose_answer_gets_lost_is_a_failure(gateway: tuple[str, str, Line]) -> None:
    """The second try finds the record no longer claimed, because the first one has written it."""
    direct, through, way = gateway
    with (
        hearing(CLAIM_FAILED, claim_lost) as told,
        pytest.raises(ValueError, match="of the work"),
        idempotent(KEY, using=through),
    ):
        way.cut_after = 0
        raise ValueError("of the work")
    assert way.cut_after is None
    assert [event["signal"] for event in told] == [CLAIM_FAILED]
    assert record_of(direct).state == IdempotencyRecord.State.FAILED


def test_a_message_that_is_put_back_is_not_lost_with_the_answer(
    gateway: tuple[str, str, Line], mailbox: Mailbox
) -> None:
    """A carried task whose message is to be redelivered is not reported as lost."""
    direct, through, way = gateway
    carried = Carried(mailbox, through)

    def requeue(task: Any, *args: object) -> None:
        way.cut_after = 0
        raise Reject("again", requeue=True)

    carried.body = requeue
    message = carried.send()
    with hearing(claim_lost) as told:
        assert mailbox.deliver(message).state == "REJECTED"
    assert (way.cut_after is None, told) == (True, [])
    carried.alias = direct
    assert (carried.row.token, carried.row.error.partition(":")[0]) == ("", "Reject")


def test_a_claim_whose_answer_gets_lost_is_free_after_its_lease(
    gateway: tuple[str, str, Line],
) -> None:
    """A process that does not know whether it has the claim does nothing; another works later."""
    direct, through, way = gateway
    connections[through].ensure_connection()
    # The look that comes first is answered: this is the claim's own.
    with pytest.raises(ValueError, match="no"), idempotent(KEY, using=through):
        raise ValueError("no")
    unanswered = at_statement(through, "UPDATE", partial(setattr, way, "cut_after", 0))
    with unanswered, pytest.raises(DatabaseError):
        enter(using=through, timeout=600)
    assert way.cut_after is None
    assert record_of(direct).state == IdempotencyRecord.State.RUNNING
    assert not try_once(direct, "too early")
    end_lease(direct)
    assert try_once(direct, "of the second")
    assert record_of(direct).claims == 3
