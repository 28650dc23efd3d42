"""manage.py celery_idempotency and the task that prunes: their output, and their deletions."""

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import pytest
from django.db import connections, transaction
from django.db.models import F
from pytest_django import Settings

from django_celery_safe import idempotent
from django_celery_safe.databases import MYSQL
from django_celery_safe.idempotency.record_table import record_table
from django_celery_safe.leases.holder import Holder, encode_holder, plain_name
from django_celery_safe.management.console import age
from django_celery_safe.models import IdempotencyRecord
from tests import commands
from tests.conftest import MakeDatabase
from tests.processes import wait_for
from tests.servers.databases import DatabaseKind, registered
from tests.terminal import answer

#: A result that must show in ``show`` alone.
SECRET: Final = "the-secret-of-the-result"
#: A lease that no test outlasts, s.
LEASE: Final = 36_000
HOUR: Final = 3600
DAY: Final = 24 * HOUR
#: A key that is too long to stand in the table as it is.
LONG_KEY: Final = f"shop.tasks.charge:{'x' * 500}"
#: A key with half of a character, which no database takes as it is.
BROKEN_KEY: Final = "mail:\ud800"


run = partial(commands.run, "celery_idempotency")
listed = partial(commands.listed, "celery_idempotency")
refused = partial(commands.refused, "celery_idempotency")


class InShop:
    """Keeps the records in a database of their own."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        """Return the alias for the package's tables, else no opinion."""
        return "shop" if model._meta.app_label == "django_celery_safe" else None


@pytest.fixture
def shop(make_database: MakeDatabase, db_kind: DatabaseKind, settings: Settings) -> str:
    """The database with the records; its clock and ours are the same."""
    settings.DATABASE_ROUTERS = [f"{__name__}.InShop"]
    return make_database(db_kind, "shop")


def shown(key: str, *arguments: str) -> dict[str, Any]:
    """Return the record that ``show --json`` shows."""
    row: dict[str, Any] = json.loads(run("show", key, "--json", *arguments))
    return row


def rows_of(key: str, alias: str = "shop") -> Any:
    """Return the record of a key, one or none, as a queryset."""
    return IdempotencyRecord.objects.using(alias).filter(key=plain_name(key))


def keys(alias: str = "shop") -> set[str]:
    """Return the keys of all records, as they stand in the table."""
    return set(IdempotencyRecord.objects.using(alias).values_list("key", flat=True))


def leave_done(
    key: str, *, age: float = 0, ttl: float | None = DAY, result: Any = None, alias: str = "shop"
) -> str:
    """Let a thing have been done ``age`` s ago, for ``ttl`` s."""
    with idempotent(key, ttl=ttl, using=alias) as claim:
        assert claim
        claim.finish(result)
    make_older(key, age, alias)
    return key


def leave_failed(key: str, error: str = "refused", *, age: float = 0, ttl: float = DAY) -> str:
    """Let a thing have failed ``age`` s ago."""
    with pytest.raises(ValueError), idempotent(key, ttl=ttl, using="shop"):  # noqa: PT011
        raise ValueError(error)
    make_older(key, age)
    return key


def leave_running(
    key: str,
    *,
    age: float = 0,
    lease: float = LEASE,
    holder: Holder | None = None,
    claims: int = 1,
) -> str:
    """Let somebody have begun a thing ``age`` s ago; with ``lease`` 0 he is gone since."""
    if holder is None:
        holder = Holder("web1", 42, task="shop.tasks.charge", task_id="6f1c")
    token = os.urandom(16).hex()
    text = encode_holder(key, holder)
    record_table("shop").add_if_absent(key, token, timedelta(seconds=lease), holder=text, digest="")
    rows_of(key).update(claims=claims)
    make_older(key, age)
    return key


def make_older(key: str, age: float, alias: str = "shop") -> None:
    """Let all that happened to a record have happened ``age`` s before it did."""
    if age:
        past = timedelta(seconds=age)
        moments = ("claimed_at", "ended_at", "ends_at", "expires_at")
        rows_of(key, alias).update(**{name: F(name) - past for name in moments})


# list


def test_list_shows_each_record(shop: str) -> None:
    """A record has its key, state and age, who claimed it, and what was wrong if it failed."""
    assert run("list") == "There is no record.\n"
    leave_done("expired", age=6 * HOUR, ttl=1)
    leave_running("left", age=5 * HOUR, lease=1, holder=Holder())
    leave_failed("mail:3", "the mailbox is full", age=3 * HOUR)
    leave_done("mail:2", age=2 * HOUR, ttl=50 * HOUR)
    leave_running("mail:1", claims=3)
    us = f"    pid {os.getpid()} on {socket.gethostname()}"
    assert re.sub(r"\d+\.\ds ago", "now", run("list")).splitlines() == [
        "mail:1",
        "    running, claimed now, lease of 10h, 3 times",
        "    6f1c, pid 42 on web1",
        "mail:2",
        "    done, claimed 2h ago, expires in 48h",
        us,
        "mail:3",
        "    failed, claimed 3h ago, expires in 21h",
        us,
        "    ValueError: the mailbox is full",
        "left",
        "    running, its process is gone, claimed 5h ago",
        "    not known",
        "expired",
        "    done, claimed 6h ago, expired",
        us,
    ]


def test_list_as_json(shop: str) -> None:
    """--json has an object for each record, with ages in seconds and what is not known as null."""
    leave_running("left", age=400, lease=1, holder=Holder())
    leave_failed("mail:3", age=300)
    leave_done("mail:2", age=120, ttl=3600)
    leave_running("mail:1", claims=3)
    running, done, failed, left = listed()
    assert 0 <= running["age_s"] < 600
    assert LEASE - 600 < running["remaining_s"] <= LEASE
    assert datetime.fromisoformat(running["claimed_at"]).tzinfo is not None
    assert (running["key"], running["state"], running["claims"]) == ("mail:1", "running", 3)
    assert (running["task"], running["task_id"]) == ("shop.tasks.charge", "6f1c")
    assert (running["host"], running["pid"]) == ("web1", 42)
    assert (running["ended_at"], running["expires_in_s"], running["error"]) == (None, None, "")
    assert (done["state"], done["task"], done["remaining_s"]) == ("done", None, None)
    assert 120 <= done["age_s"] < 720
    assert 0 < done["expires_in_s"] <= 3600 - 120
    assert done["ended_at"] >= done["claimed_at"]
    assert (failed["state"], failed["error"]) == ("failed", "ValueError: refused")
    assert (left["host"], left["pid"], left["remaining_s"]) == (None, None, 0)
    assert [row["key"] for row in listed("--state", "failed")] == ["mail:3"]


@pytest.mark.sql
def test_list_by_prefix(shop: str) -> None:
    """--prefix is of whole keys, also of hashed ones, by case, and without SQL's wildcards."""
    hashed = [LONG_KEY, "mail:größe", "mail: 1", BROKEN_KEY]
    for key in (
        *hashed,
        "mail:plain",
        "Mail:1",
        "Mail:ö",
        "a-mail:1",
        "sha256",
        "100%:1",
        "100x:1",
    ):
        leave_done(key)
    leave_running("mail:3")
    assert keys() > {*map(plain_name, hashed), "mail:plain", "sha256"}

    def found(prefix: str, *more: str) -> set[str]:
        return {row["key"] for row in listed("--prefix", prefix, *more)}

    mails = {"mail:größe", "mail: 1", BROKEN_KEY, "mail:plain"}
    assert found("mail:") == {*mails, "mail:3"}
    assert found("mail", "--state", "done") == mails
    assert found("mail:grö") == found("mail:gr") == {"mail:größe"}
    assert found("Mail:") == {"Mail:1", "Mail:ö"}
    assert found("100%") == {"100%:1"}
    assert found(BROKEN_KEY) == {BROKEN_KEY}
    assert found(LONG_KEY) == found(LONG_KEY[:300]) == {LONG_KEY}
    assert found(f"{LONG_KEY}y") == found("größe") == found("sha256:") == found("MAIL") == set()
    assert found("sha256") == {"sha256"}
    assert "There are more" not in run("list", "--prefix", "mail", "--limit", "5")
    assert "There are more" in run("list", "--prefix", "mail", "--limit", "4")
    assert len(found("")) == 12


# show


def test_show_has_all_of_a_record(shop: str) -> None:
    """It has a line for each thing that is known, the result too; - for what is not."""
    result = {"id": SECRET, "copies": [1, None]}
    leave_done("mail:1", result=result, ttl=None)
    title, *rest = run("show", "mail:1").splitlines()
    lines = {line[4:16].strip(): line[16:] for line in rest}
    assert (title, lines["state"], lines["claims"]) == ("mail:1", "done", "1")
    assert (lines["task"], lines["lease left"], lines["expires at"]) == ("-", "-", "-")
    assert lines["process"] == f"pid {os.getpid()} on {socket.gethostname()}"
    assert (lines["error"], shown("mail:1")["error"]) == ("-", "")
    assert json.loads(lines["result"]) == result
    row = shown("mail:1")
    assert row.pop("result") == result
    assert row.keys() == listed()[0].keys()
    assert refused("show", "mail") == ("", "There is no record 'mail'.")


def test_show_of_results(shop: str) -> None:
    """No result is - and null; a date is as it is stored; only ``show`` prints results."""
    for key in (leave_done("none"), leave_running("runs"), leave_failed("failed")):
        assert run("show", key).splitlines()[-1].split() == ["result", "-"]
        assert shown(key)["result"] is None
    leave_done("dated", result={"at": datetime(2026, 1, 2), "secret": SECRET})
    assert "2026-01-02" in run("show", "dated")
    leave_done("numbers", result=[float("nan"), float("inf"), 1.5])
    assert shown("numbers")["result"] == ["NaN", "Infinity", 1.5]
    actions = ("list", "list --json", "forget dated --no-input", "prune --older-than 1h")
    assert SECRET not in "".join(run(*action.split()) for action in actions)


# forget


def test_forget_lets_it_be_done_again(shop: str) -> None:
    """Forgotten work is done again at the next call; other records stay."""
    leave_done("mail:1", result=1)
    leave_done("mail:2", result=2)
    leave_failed("mail:3")
    leave_running("mail:4", age=100, lease=1)
    named = ("mail:1", "mail:3", "mail:4")
    assert run("forget", "--dry-run", *named) == "3 record(s) would be forgotten.\n"
    assert len(keys()) == 4
    assert run("forget", "--no-input", *named) == "3 record(s) were forgotten.\n"
    assert keys() == {"mail:2"}
    with idempotent("mail:1", using=shop) as claim:
        assert claim


def test_keys_that_are_not_there(shop: str) -> None:
    """Unknown keys are named and fail the command; others are forgotten, one named twice once."""
    leave_done("mail:1")
    for dry in ("--dry-run", "--no-input"):
        out, why = refused("forget", dry, "mail:1", "mail:1", "mail:2", "mail")
        assert out.startswith("1 record(s) ")
        assert why.startswith("There is no record mail:2, mail. `manage.py celery_idempotency")
    assert keys() == set()


def test_a_hashed_key_can_be_given_in_both_forms(shop: str) -> None:
    """A record under a hash is found by the whole key and by the hash, which are one record."""
    for key in (LONG_KEY, "an order with spaces", "größe:1"):
        leave_done(key)
        assert keys() == {plain_name(key)} != {key}
        assert shown(plain_name(key))["key"] == shown(key)["key"] == key
        nobody = plain_name("x" * 300)
        out, why = refused("forget", "--no-input", key, plain_name(key), nobody)
        assert out == "1 record(s) were forgotten.\n"
        assert why.startswith(f"There is no record {nobody}. ")


def test_what_is_being_done_is_not_forgotten(shop: str) -> None:
    """A running record is named with its key and its process, and nothing is forgotten."""
    leave_done("mail:1")
    leave_running("mail:2")
    leave_running(LONG_KEY, holder=Holder("web2", 43))
    named = ("mail:1", "mail:2", plain_name(LONG_KEY))
    for more in ("--no-input", "--dry-run"):
        out, why = refused("forget", more, *named)
        assert out == ""
        assert why.startswith("Still running: ")
        assert "mail:2 (6f1c, pid 42 on web1)" in why
        assert f"{LONG_KEY} (pid 43 on web2)" in why
        assert "mail:1" not in why
        assert why.endswith("or add --force. Nothing was forgotten.")
    assert len(keys()) == 3
    assert run("forget", "--dry-run", "--force", *named) == "3 record(s) would be forgotten.\n"
    assert run("forget", "--no-input", "--force", *named) == "3 record(s) were forgotten.\n"


def test_forget_asks(shop: str) -> None:
    """forget shows what it is about; only yes is yes, and what was done anew meanwhile stays."""
    named = sorted(leave_done(f"mail:{number}") for number in range(22))
    out, why = refused("forget", *named)
    assert (out, "there is no terminal to ask at" in why) == ("", True)
    assert answer("no\n", "celery_idempotency", "forget", *named)[1].startswith("The answer was")

    def read(question: str) -> None:
        assert question.count("    done, claimed ") == 20
        assert "\n... and 2 more.\nThe work of these records will be done again" in question
        assert question.endswith("\nForget 22 record(s)? [yes/no] ")
        assert keys() == set(named)
        run("forget", "mail:1", "--no-input")
        leave_done("mail:1")

    told, why = answer("yes\n", "celery_idempotency", "forget", *named, meanwhile=read)
    assert told.endswith("21 record(s) were forgotten.\n")
    assert why.startswith("1 record(s) were claimed, or gone, before")
    assert keys() == {"mail:1"}


@contextmanager
def before_deleting(alias: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Let another thread ``act`` between the command's look and its DELETE; gives the DELETEs."""
    deletes: list[str] = []

    def act_there() -> None:
        with closing(connections[alias]):
            act()

    def wrap(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        # MariaDB locks the rows before it deletes them.
        if "FOR UPDATE" in sql if connections[alias].vendor == MYSQL else sql.startswith("DELETE"):
            deletes.append(sql)
            thread = threading.Thread(target=act_there)
            thread.start()
            thread.join()
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(wrap):
        yield deletes


def claim_anew() -> bool:
    """Claim the record of mail:1, as another process does."""
    text, lease = encode_holder("mail:1", Holder("web2", 43)), timedelta(seconds=LEASE)
    row = record_table("shop").at("mail:1")
    return row.try_claim("new", lease, holder=text, digest="", claims=2)


@pytest.mark.sql
def test_one_that_is_claimed_or_goes_meanwhile_is_not_forgotten(shop: str) -> None:
    """A claim between the look and the deletion is safe, and the command tells of it."""

    def forget(act: Callable[[], object], *more: str) -> None:
        with before_deleting(shop, act) as deletes:
            out, why = refused("forget", "--no-input", "mail:1", *more)
        assert (out, len(deletes)) == ("0 record(s) were forgotten.\n", 1)
        assert why.startswith("1 record(s) were claimed, or gone, before they could be forgotten.")

    for begin in (
        lambda: leave_failed("mail:1"),
        lambda: leave_running("mail:1", age=100, lease=1),
        lambda: leave_done("mail:1", age=100, ttl=1),
    ):
        begin()
        forget(claim_anew)
        assert rows_of("mail:1").get().token == "new"
        forget(lambda: rows_of("mail:1").delete(), "--force")


def test_a_claim_that_commits_during_the_deletion_is_safe(
    make_database: MakeDatabase, settings: Settings
) -> None:
    """On PostgreSQL the DELETE waits for a claim that is not committed, and leaves its record."""
    settings.DATABASE_ROUTERS = [f"{__name__}.InShop"]
    alias = make_database("postgres", "shop")
    leave_failed("mail:1")

    def somebody_waits() -> bool:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
            return bool(cursor.fetchone()[0])

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(using=alias):
            assert claim_anew()
            out = pool.submit(forget_elsewhere)
            wait_for(somebody_waits, 20)
        assert out.result()[1].startswith("1 record(s) were claimed, or gone, ")
    assert rows_of("mail:1").get().token == "new"


def forget_elsewhere() -> tuple[str, str]:
    """Forget mail:1 in another thread, which closes its connection."""
    with closing(connections["shop"]):
        return refused("forget", "--no-input", "mail:1")


# prune


def test_prune(shop: str, settings: Settings) -> None:
    """Expired records go, orphaned ones after the retention; --older-than goes by age."""
    leave_done("expired", age=100, ttl=50)
    leave_failed("failed", age=100, ttl=50)
    leave_done("kept", age=100, ttl=None)
    leave_running("left", age=100, lease=1)
    leave_running("runs", age=100, lease=100 + LEASE)
    assert run("prune", "--dry-run") == "2 record(s) would be deleted.\n"
    assert len(keys()) == 5
    assert run("prune") == "2 record(s) were deleted.\n"
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"records": 50}}
    assert run("prune") == "1 record(s) were deleted.\n"
    assert keys() == {"kept", "runs"}
    settings.DJANGO_CELERY_SAFE = {"RETENTION": {"records": "a week"}}
    assert "RETENTION['records']='a week'" in refused("prune")[1]
    assert run("prune", "--older-than", "200") == "0 record(s) were deleted.\n"
    assert run("prune", "--older-than", "50") == "1 record(s) were deleted.\n"
    assert keys() == {"runs"}


def test_ages_have_units() -> None:
    """A number without a unit is seconds; what is no time that a date can be away is refused."""
    for text, seconds in (
        ("90", 90),
        ("90s", 90),
        ("1.5m", 90),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
    ):
        assert age(text) == timedelta(seconds=seconds)
    for text in ("", "-1", "7 d", "7days", "d", "nan", "inf", "1e3", "9" * 400):
        why = refused("prune", f"--older-than={text}")[1]
        assert f"argument --older-than: '{text}' is not a valid time; write" in why


# Databases and refusals


def test_several_databases(shop: str, make_database: MakeDatabase) -> None:
    """--database names others than the router's, before the action or after it."""
    make_database("sqlite", "other")
    both = ["--database", "shop", "--database", "other"]
    for alias in (shop, "other"):
        leave_done(f"new-{alias}", alias=alias)
    assert "new-other" in run("--database", "other", "list")
    assert [row["key"] for row in listed(*both)] == ["new-shop", "new-other"]
    assert "There is no record" in refused("show", "new-other")[1]
    assert shown("new-other", *both)["state"] == "done"
    assert run("forget", "--no-input", "new-shop", "new-other", *both).startswith("2 record(s)")
    assert (keys(), keys("other")) == (set(), set())


@pytest.mark.sql
def test_a_missing_table_hints_at_migrate(shop: str) -> None:
    """Where the table is missing, each action says what to run, and for which database."""
    with connections[shop].schema_editor() as editor:
        editor.delete_model(IdempotencyRecord)
    for action in ("list", "show mail:1", "forget mail:1", "prune"):
        out, why = refused(*action.split())
        assert out == ""
        assert why.startswith("The database 'shop' has no table for the records (")
        assert "django_celery_safe_idempotencyrecord" in why
        assert why.endswith("). Run manage.py migrate --database=shop.")


def test_who_may_not_read_the_table(shop: str, postgres_alias: str) -> None:
    """A table that may not be read is there: the error says so, and does not hint at migrate."""
    server = {**connections.settings[postgres_alias], "USER": "stranger"}
    with connections[postgres_alias].cursor() as cursor:
        cursor.execute("CREATE ROLE stranger LOGIN")
        try:
            with registered("strange", server):
                for action in ("list", "show mail:1", "forget mail:1", "prune"):
                    out, why = refused(*action.split(), "--database", "strange")
                    assert out == ""
                    assert why.startswith("The database can't be asked, of strange: ")
                    assert "permission denied for table django_celery_safe_idempot" in why
                    assert "migrate" not in why
        finally:
            cursor.execute("DROP ROLE stranger")
