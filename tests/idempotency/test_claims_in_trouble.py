"""Claims whose holder dies or stands still, and whose database is slow, gone and back."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
from celery.exceptions import Reject, SoftTimeLimitExceeded
from django.db import DatabaseError, connections, transaction
from psycopg import sql

from django_celery_safe import AlreadyClaimed, ClaimLost, IdempotencyError, idempotent
from django_celery_safe.databases import Now
from django_celery_safe.models import IdempotencyRecord
from django_celery_safe.signals import claim_failed, claim_finished, claim_lost, message_lost
from tests.app.models import Person
from tests.concurrency.conftest import mailbox
from tests.concurrency.mailbox import Mailbox
from tests.conftest import MakeDatabase
from tests.idempotency.gateway import Gateway
from tests.idempotency.test_claims import add, add_and_finish, add_first, follow
from tests.idempotency.test_flags_race import end_sessions
from tests.processes import start_in_process, tell, wait_for
from tests.sending.carrying import Carried
from tests.sending.conftest import hearing
from tests.servers import PostgresServer
from tests.servers.databases import registered, waits_for_a_lock

__all__ = ["mailbox"]

KEY: Final = "invoice:1"
#: A lease that a test can outwait, s.
LEASE: Final = 2
#: SQLite's clock counts milliseconds.
TICK: Final = timedelta(milliseconds=2)


def record_of(alias: str) -> Any:
    """Return the record, with the database's time as ``now``."""
    return IdempotencyRecord.objects.using(alias).annotate(now=Now()).get(key=KEY)


def try_once(alias: str, result: Any) -> bool:
    """Do it unless it is being done; tell whether it was done here."""
    with suppress(AlreadyClaimed), idempotent(KEY, using=alias) as claim:
        if claim:
            claim.finish(result)
            return True
    return False


def result_of_repeat(alias: str) -> Any:
    """Return what a repeat gets."""
    with idempotent(KEY, using=alias) as claim:
        assert not claim
        return claim.result


# The holder.


def hold(alias: str, gate: Path, way: str) -> str:
    """Claim, tell so, and finish when the gate opens; return how that ended."""
    with hearing(claim_finished, claim_failed, claim_lost) as told:
        try:
            with idempotent(KEY, using=alias, timeout=LEASE) as claim:
                assert claim
                if way == "finish":
                    _pass(gate)
                    claim.finish("of the first")
                else:
                    with transaction.atomic(using=alias):
                        if way == "atomic":
                            # Not before: on SQLite it would keep all others from writing.
                            _pass(gate)
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
    names = {claim_finished: "finished", claim_failed: "failed", claim_lost: "lost"}
    return " ".join([ended, *sorted({names[event["signal"]] for event in told})])


def _pass(gate: Path) -> None:
    tell("inside")
    wait_for(gate.exists, 60)


def kill_holder(alias: str, gate: Path, way: str) -> None:
    """Kill a process inside its claim, before what it does at the gate."""
    with start_in_process(hold, alias, gate, way) as process:
        process.receive()
        process.kill()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_killed_holder_is_followed_after_its_lease(
    kind: Any, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """The work of a killed process is free when its lease is over, and not before."""
    alias = make_database(kind)
    kill_holder(alias, tmp_path / "gate", "finish")
    ends_at: datetime = record_of(alias).ends_at
    wait_for(lambda: try_once(alias, "of the second"), 30, "it was not freed")
    record = record_of(alias)
    assert record.claimed_at > ends_at - TICK
    assert record.claims == 2
    assert result_of_repeat(alias) == "of the second"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_holder_killed_in_its_transaction_leaves_nothing(
    kind: Any, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """Between finish() and the commit neither is there; the next one does both."""
    alias = make_database(kind)
    kill_holder(alias, tmp_path / "gate", "commit")
    assert not Person.everyone.using(alias).exists()
    wait_for(lambda: try_once(alias, "of the second"), 30, "it was not freed")
    assert result_of_repeat(alias) == "of the second"


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize("way", ["finish", "atomic"])
@pytest.mark.parametrize("kind", [pytest.param("sqlite", marks=pytest.mark.nightly), "postgres"])
def test_a_holder_that_was_paused_can_not_finish(
    kind: Any, way: str, is_done: bool, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """Stopped past its lease and followed by another, it gets ClaimLost, and writes nothing."""
    alias, gate = make_database(kind), tmp_path / "gate"
    with start_in_process(hold, alias, gate, way) as process:
        process.receive()
        process.pause()
        gate.touch()
        ends_at: datetime = record_of(alias).ends_at
        wait_for(lambda: record_of(alias).now > ends_at, 30)
        with idempotent(KEY, using=alias) as claim:
            assert claim
            if is_done:
                claim.finish("of the second")
            process.resume()
            assert process.result() == "ClaimLost lost"
            if not is_done:
                claim.finish("of the second")
    assert not Person.everyone.using(alias).exists()
    assert result_of_repeat(alias) == "of the second"


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_holder_that_nobody_followed_finishes(
    kind: Any, make_database: MakeDatabase, tmp_path: Path
) -> None:
    """Stopped past its lease, but still the last who claimed, it is done by it."""
    alias, gate = make_database(kind), tmp_path / "gate"
    with start_in_process(hold, alias, gate, "atomic") as process:
        process.receive()
        process.pause()
        gate.touch()
        ends_at: datetime = record_of(alias).ends_at
        wait_for(lambda: record_of(alias).now > ends_at, 30)
        process.resume()
        assert process.result() == "done finished"
    assert Person.everyone.using(alias).count() == 1
    assert result_of_repeat(alias) == "of the first"


@pytest.mark.parametrize(
    ("way", "ends", "is_done_by"),
    [
        ("commit", {"done finished"}, "first"),
        ("roll back", {"ValueError lost", "ValueError failed"}, "second"),
    ],
)
def test_who_comes_after_finish_waits_for_the_end_of_the_transaction(
    way: str,
    ends: set[str],
    is_done_by: str,
    postgres_alias: str,
    postgres_server: PostgresServer,
    tmp_path: Path,
) -> None:
    """
    However long it stays open after finish(), its commit decides for others.

    After a rollback one that waited at the row has it at once, and the first is told what
    became of it.
    """
    gate = tmp_path / "gate"
    with start_in_process(hold, postgres_alias, gate, way) as process:
        process.receive()
        wait_for(lambda: record_of(postgres_alias).now > record_of(postgres_alias).ends_at, 30)
        with start_in_process(try_once, postgres_alias, "of the second") as second:
            wait_for(
                lambda: waits_for_a_lock(postgres_server, postgres_alias), 30, "it did not wait"
            )
            gate.touch()
            assert process.result() in ends
            assert second.result() is (is_done_by == "second")
    assert result_of_repeat(postgres_alias) == f"of the {is_done_by}"


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize(
    ("step", "ending"), [(add_first, None), (add_and_finish, "stored"), (follow, None)]
)
def test_stricter_isolation_makes_no_other_errors(
    step: Callable[[Any], None], ending: str | None, level: str,
    postgres_alias: str, postgres_server: PostgresServer,
) -> None:  # fmt: skip
    """The second of two claims at one moment reports the other's claim or result."""
    set_default(postgres_server, postgres_alias, "default_transaction_isolation", level)
    connections[postgres_alias].close()
    records = IdempotencyRecord.objects.using(postgres_alias)
    if step is follow:
        add(records, -timedelta(minutes=1))
    inside = threading.Event()

    def come_first() -> None:
        try:
            with transaction.atomic(using=postgres_alias):
                step(records)
                inside.set()
                wait_for(
                    lambda: waits_for_a_lock(postgres_server, postgres_alias), 30, "nobody waits"
                )
        finally:
            connections[postgres_alias].close()

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(come_first)
        assert inside.wait(30)
        if ending is None:
            with pytest.raises(AlreadyClaimed), idempotent(KEY, using=postgres_alias):
                pytest.fail("the block ran")
        else:
            assert result_of_repeat(postgres_alias) == ending
        first.result()


def set_default(server: PostgresServer, alias: str, parameter: str, value: str) -> None:
    """Give a database a default, which sessions have that begin from now on."""
    with server.connect() as connection:
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET {} = {}").format(
                sql.Identifier(str(connections.settings[alias]["NAME"])),
                sql.Identifier(parameter),
                sql.Literal(value),
            )
        )


@pytest.mark.parametrize("way", ["end", "raise", "exit", "finish"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_forked_child_leaves_the_claim_to_its_parent(
    kind: Any, way: str, make_database: MakeDatabase
) -> None:
    """However a child leaves the block that it was forked in, only its parent ends the claim."""
    alias = make_database(kind)
    with start_in_process(fork_inside, alias, way) as process:
        # The child's exit status, and the record after it.
        assert process.result() == (0, "running", "finished")
    assert result_of_repeat(alias) == "of the parent"
    assert record_of(alias).claims == 1


def fork_inside(alias: str, way: str) -> tuple[int, str, str]:
    """Fork in the block, have the child leave it, and finish when the child is gone."""
    child, left_by = -1, ""
    with hearing(claim_finished, claim_failed, claim_lost) as told:
        try:
            with idempotent(KEY, using=alias) as claim:
                child = os.fork()
                if child:
                    _, status = os.waitpid(child, 0)
                    state = record_of(alias).state
                    claim.finish("of the parent")
                elif way == "raise":
                    raise ValueError(way)
                elif way == "exit":
                    sys.exit()
                elif way == "finish":
                    claim.finish("of the child")
            left_by = "end"
        except ValueError:
            left_by = "raise"
        except SystemExit:
            left_by = "exit"
        except IdempotencyError as error:
            left_by = "finish" if "the process that forked this one" in str(error) else ""
        finally:
            if child == 0:
                os._exit(0 if left_by == way and not told else 1)
    names = {claim_finished: "finished", claim_failed: "failed", claim_lost: "lost"}
    (ending,) = [names[event["signal"]] for event in told]
    return os.waitstatus_to_exitcode(status), state, ending


# The database.


@contextmanager
def closed_door(server: PostgresServer, alias: str) -> Iterator[Callable[[], None]]:
    """Give what ends all sessions of a database, and lets nobody in until the end of the block."""

    def let_in(allowed: bool) -> None:
        name = sql.Identifier(str(connections.settings[alias]["NAME"]))
        with server.connect() as connection:
            connection.execute(
                sql.SQL("ALTER DATABASE {} ALLOW_CONNECTIONS {}").format(name, sql.Literal(allowed))
            )

    def close() -> None:
        let_in(False)
        end_sessions(server, alias)

    try:
        yield close
    finally:
        let_in(True)


def test_a_failure_that_cant_be_noted_is_no_loss(
    postgres_alias: str, postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """If the database does not answer, nobody is told that another has the claim."""
    with (
        hearing(claim_lost, claim_failed, claim_finished) as told,
        closed_door(postgres_server, postgres_alias) as close,
        pytest.raises(ValueError, match="of the work"),
        idempotent(KEY, using=postgres_alias),
    ):
        close()
        raise ValueError("of the work")
    assert told == []
    assert record_of(postgres_alias).state == "running"
    assert "failed; it is free when its lease is over" in caplog.text


def test_a_failure_is_noted_by_a_new_connection(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """If the server ended the session, the next who comes need not wait for the lease."""
    with (
        hearing(claim_lost, claim_failed, claim_finished) as told,
        pytest.raises(ValueError, match="of the work"),
        idempotent(KEY, using=postgres_alias),
    ):
        end_sessions(postgres_server, postgres_alias)
        raise ValueError("of the work")
    assert [event["signal"] for event in told] == [claim_failed]
    assert record_of(postgres_alias).state == IdempotencyRecord.State.FAILED
    assert try_once(postgres_alias, "of the second")


def test_what_was_committed_is_done_though_the_connection_breaks(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """If the server ends the session after the commit, another finds that it was ours."""
    with (
        hearing(claim_lost, claim_failed, claim_finished) as told,
        idempotent(KEY, using=postgres_alias) as claim,
    ):
        with transaction.atomic(using=postgres_alias):
            Person.everyone.using(postgres_alias).create(pk=1)
            claim.finish("stored")
        end_sessions(postgres_server, postgres_alias)
    assert [event["signal"] for event in told] == [claim_finished]
    connections[postgres_alias].close()  # it broke under the caller, and nobody has asked since
    assert result_of_repeat(postgres_alias) == "stored"
    assert record_of(postgres_alias).claims == 1


def test_a_database_that_can_only_be_read_for_a_while_is_asked_again(
    postgres_alias: str, postgres_server: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The statement is repeated, as after a failover to a server that will soon take writes."""

    def let_write(allowed: bool) -> None:
        value = "off" if allowed else "on"
        set_default(postgres_server, postgres_alias, "default_transaction_read_only", value)

    def let_write_later() -> bool:
        wait_for(lambda: "retrying" in caplog.text, 20, "it was not tried again")
        let_write(True)
        if finished.wait(20):
            return True
        # It keeps to a session that can only read, and its lease is renewed by another.
        end_sessions(postgres_server, postgres_alias)
        return False

    finished = threading.Event()

    # The session that can only read is not given up because of its age.
    connections.settings[postgres_alias]["CONN_MAX_AGE"] = None
    with ThreadPoolExecutor(1) as pool, idempotent(KEY, using=postgres_alias, timeout=20) as claim:
        let_write(False)
        # So that the next one begins so.
        connections[postgres_alias].close()
        writing = pool.submit(let_write_later)
        claim.finish("stored")
        finished.set()
        assert writing.result()
    assert "read-only transaction" in caplog.text
    assert result_of_repeat(postgres_alias) == "stored"
    assert record_of(postgres_alias).claims == 1


def test_a_connection_that_breaks_meanwhile_does_not_undo_the_work(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """If the server ended the session while the work went on, it is finished in another."""
    with idempotent(KEY, using=postgres_alias) as claim:
        assert claim
        end_sessions(postgres_server, postgres_alias)
        claim.finish("stored")
    assert result_of_repeat(postgres_alias) == "stored"
    assert record_of(postgres_alias).claims == 1


def test_a_database_that_is_back_within_the_lease_is_told(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """While the server restarts, a decorated function comes back until it is noted."""

    @idempotent("{number}", using=postgres_alias)
    def work(number: int) -> int:
        postgres_server.stop()
        starting.start()
        return 2 * number

    starting = threading.Timer(0.5, postgres_server.start)
    try:
        assert work(1) == 2
    finally:
        starting.join()
        postgres_server.start()
    assert work(1) == 2
    records = IdempotencyRecord.objects.using(postgres_alias)
    assert [(record.state, record.claims) for record in records.all()] == [("done", 1)]


def test_a_database_that_stays_away_is_an_error(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """Beyond the lease the error reaches the caller, and later somebody else does it."""
    try:
        with (
            pytest.raises(DatabaseError),
            idempotent(KEY, using=postgres_alias, timeout=LEASE) as claim,
        ):
            assert claim
            postgres_server.stop()
            claim.finish("stored")
    finally:
        postgres_server.start()
    assert record_of(postgres_alias).state == IdempotencyRecord.State.RUNNING
    wait_for(lambda: try_once(postgres_alias, "of the second"), 30, "it was not freed")
    assert result_of_repeat(postgres_alias) == "of the second"


def test_a_database_that_is_away_begins_nothing(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """Without the record nothing is done: the database's own error reaches the caller."""
    connections[postgres_alias].close()
    postgres_server.stop()
    try:
        with pytest.raises(DatabaseError), idempotent(KEY, using=postgres_alias):
            pytest.fail("the block ran")
    finally:
        postgres_server.start()
    with idempotent(KEY, using=postgres_alias) as claim:
        assert claim


def test_an_error_while_the_database_is_away_comes_through(
    postgres_alias: str, postgres_server: PostgresServer
) -> None:
    """The work's own error leaves the block although its failure can't be recorded."""
    try:
        with (
            pytest.raises(ValueError, match="of the work"),
            idempotent(KEY, using=postgres_alias, timeout=LEASE),
        ):
            postgres_server.stop()
            raise ValueError("of the work")
    finally:
        postgres_server.start()
    # Celery and Django do that between two tasks, or requests.
    connections[postgres_alias].close_if_unusable_or_obsolete()
    wait_for(lambda: try_once(postgres_alias, "of the second"), 30, "it was not freed")


@contextmanager
def _written_to(alias: str, gate: Path) -> Iterator[None]:
    """Have another process keep a SQLite file locked until the gate opens."""
    with start_in_process(write_until, alias, gate) as process:
        process.receive()
        yield
        process.result()


def write_until(alias: str, gate: Path) -> None:
    """Keep a write transaction open until the gate opens."""
    with transaction.atomic(using=alias):
        Person.everyone.using(alias).create(pk=1)
        _pass(gate)


def test_a_file_that_is_locked_for_long_does_not_undo_the_work(
    make_database: MakeDatabase, tmp_path: Path
) -> None:
    """On SQLite "database is locked" is waited for as long as the lease lasts."""
    alias, gate = make_database("sqlite"), tmp_path / "gate"
    connections.settings[alias]["OPTIONS"]["timeout"] = 0.1
    opening = threading.Timer(1, gate.touch)
    with idempotent(KEY, using=alias) as claim:
        assert claim
        with _written_to(alias, gate):
            opening.start()
            claim.finish("stored")
            assert gate.exists()
    opening.join()
    assert result_of_repeat(alias) == "stored"


@pytest.fixture
def gateway(
    postgres_alias: str, postgres_server: PostgresServer
) -> Iterator[tuple[str, str, Gateway]]:
    """The alias of a database, another one that leads there through a gateway, and that."""
    direct = connections.settings[postgres_alias]
    names = ("ENGINE", "NAME", "USER")
    with Gateway(postgres_server.host, postgres_server.port) as gateway:
        settings = {name: direct[name] for name in names}
        settings |= {"HOST": "127.0.0.1", "PORT": str(gateway.port)}
        with registered("through-gateway", settings):
            yield postgres_alias, "through-gateway", gateway


def test_an_answer_that_gets_lost_does_not_lose_the_claim(
    gateway: tuple[str, str, Gateway],
) -> None:
    """The record was finished and the answer got lost: a second look finds that it was us."""
    direct, through, way = gateway
    with hearing(claim_finished, claim_lost) as told, idempotent(KEY, using=through) as claim:
        assert claim
        way.lose_next_answer()
        claim.finish("stored")
        assert way.has_lost_it
    assert [event["signal"] for event in told] == [claim_finished]
    assert result_of_repeat(direct) == "stored"


def test_a_failure_whose_answer_gets_lost_is_a_failure(gateway: tuple[str, str, Gateway]) -> None:
    """The second try finds the record no longer claimed, because the first one has written it."""
    direct, through, way = gateway
    with (
        hearing(claim_failed, claim_lost) as told,
        pytest.raises(ValueError, match="of the work"),
        idempotent(KEY, using=through),
    ):
        way.lose_next_answer()
        raise ValueError("of the work")
    assert way.has_lost_it
    assert [event["signal"] for event in told] == [claim_failed]
    assert record_of(direct).state == IdempotencyRecord.State.FAILED


def test_a_message_that_is_put_back_is_not_lost_with_the_answer(
    gateway: tuple[str, str, Gateway], mailbox: Mailbox
) -> None:
    """A carried task whose message is to be redelivered is not reported as lost."""
    direct, through, way = gateway
    carried = Carried(mailbox, through)

    def requeue(task: Any, *args: object) -> None:
        way.lose_next_answer()
        raise Reject("again", requeue=True)

    carried.body = requeue
    message = carried.send()
    with hearing(message_lost) as told:
        assert mailbox.deliver(message).state == "REJECTED"
    assert (way.has_lost_it, told) == (True, [])
    carried.alias = direct
    assert (carried.row.token, carried.row.error.partition(":")[0]) == ("", "Reject")


def test_a_claim_whose_answer_gets_lost_is_free_after_its_lease(
    gateway: tuple[str, str, Gateway],
) -> None:
    """A process that does not know whether it has the claim does nothing; another works later."""
    direct, through, way = gateway
    connections[through].ensure_connection()
    # The look that comes first is answered: this is the claim's own.
    with pytest.raises(ValueError, match="no"), idempotent(KEY, using=through):
        raise ValueError("no")
    looked = connections[through].execute_wrapper(_lose_answers_to("UPDATE", way))
    with (
        looked,
        pytest.raises(DatabaseError),
        idempotent(KEY, using=through, timeout=600),
    ):
        pytest.fail("the block ran")
    assert way.has_lost_it
    assert record_of(direct).state == IdempotencyRecord.State.RUNNING
    assert not try_once(direct, "too early")
    records = IdempotencyRecord.objects.using(direct)
    assert records.update(ends_at=Now() - timedelta(seconds=1)) == 1
    assert try_once(direct, "of the second")
    assert record_of(direct).claims == 3


def _lose_answers_to(statement: str, way: Gateway) -> Any:
    def execute(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith(statement):
            way.lose_next_answer()
        return run(sql, params, many, context)

    return execute


SLOW_COMMIT: Final = """
    CREATE FUNCTION nap() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_sleep(1.5); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {} DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION nap();
"""


def test_a_time_limit_during_the_claim_leaves_as_one(postgres_alias: str) -> None:
    """Not as the error of the connection that it cut off, which can be used afterwards."""
    with connections[postgres_alias].cursor() as cursor:
        cursor.execute(SLOW_COMMIT.format(IdempotencyRecord._meta.db_table))

    def end(number: int, frame: object) -> None:
        raise SoftTimeLimitExceeded

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with (
            pytest.raises(SoftTimeLimitExceeded),
            idempotent(KEY, using=postgres_alias, timeout=LEASE),
        ):
            pytest.fail("the block ran")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    # The server may have gone on with the commit; then a dead claim is there for its lease.
    wait_for(lambda: try_once(postgres_alias, "of the second"), 30, "it can't be done")
    assert result_of_repeat(postgres_alias) == "of the second"
