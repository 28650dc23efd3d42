"""manage.py celery_idempotency and the task that prunes: their output, and their deletions."""

import json
import os
import re
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from celery import Celery
from django.core.management import CommandError
from django.db import connections, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from psycopg.sql import SQL, Identifier
from pytest_django import Settings

from django_celery_safe import ClaimLost, ConfigurationError, idempotent
from django_celery_safe.databases import MYSQL
from django_celery_safe.idempotency.record_table import get_prunable, record_table
from django_celery_safe.leases.holder import Holder, encode_holder, plain_name
from django_celery_safe.models import IdempotencyRecord
from django_celery_safe.tasks import prune_idempotency
from tests import commands
from tests.conftest import MakeDatabase
from tests.kinds import KINDS
from tests.processes import CeleryWorker, wait_for
from tests.servers import PostgresServer
from tests.servers.databases import gone_settings, registered, sqlite_settings
from tests.terminal import answer, on_terminal

#: Where nothing depends on the database.
in_sqlite: Final = pytest.mark.parametrize("shop", ["sqlite-immediate"], indirect=True)
PRUNE_TASK: Final = "django_celery_safe.tasks.prune_idempotency"

#: A result that must show in ``show`` alone.
SECRET: Final = "the-secret-of-the-result"
#: A lease that no test outlasts, s.
LEASE: Final = 600
DAY: Final = 86400
#: A key that is too long to stand in the table as it is.
LONG_KEY: Final = f"shop.tasks.charge:{'x' * 500}"
#: A key with half of a character, which no database takes as it is.
BROKEN_KEY: Final = "mail:\ud800"


run = partial(commands.run, "celery_idempotency")
listed = partial(commands.listed, "celery_idempotency")
refused = partial(commands.refused, "celery_idempotency")
status_of_program = partial(commands.status_of_program, "celery_idempotency")


class InShop:
    """Keeps the records in a database of their own."""

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        """Return the alias for the package's tables, else no opinion."""
        return "shop" if model._meta.app_label == "django_celery_safe" else None


@pytest.fixture(params=KINDS)
def shop(request: pytest.FixtureRequest, make_database: MakeDatabase, settings: Settings) -> str:
    """The database with the records, of each kind in turn; its clock and ours are the same."""
    settings.DATABASE_ROUTERS = [f"{__name__}.InShop"]
    return make_database(request.param, "shop")


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


def leave_failed(
    key: str, error: str = "refused", *, age: float = 0, ttl: float = DAY, alias: str = "shop"
) -> str:
    """Let a thing have failed ``age`` s ago."""
    with pytest.raises(ValueError), idempotent(key, ttl=ttl, using=alias):  # noqa: PT011
        raise ValueError(error)
    make_older(key, age, alias)
    return key


def leave_running(
    key: str,
    *,
    age: float = 0,
    lease: float = LEASE,
    holder: Holder | None = None,
    claims: int = 1,
    alias: str = "shop",
) -> str:
    """Let somebody have begun a thing ``age`` s ago; with ``lease`` 0 he is gone since."""
    if holder is None:
        holder = Holder("web1", 42, task="shop.tasks.charge", task_id="6f1c")
    token = os.urandom(16).hex()
    text = encode_holder(key, holder)
    record_table(alias).add_if_absent(key, token, timedelta(seconds=lease), holder=text, digest="")
    rows_of(key, alias).update(claims=claims)
    make_older(key, age, alias)
    return key


def make_older(key: str, age: float, alias: str) -> None:
    """Let all that happened to a record have happened ``age`` s before it did."""
    if age:
        past = timedelta(seconds=age)
        moments = ("claimed_at", "ended_at", "ends_at", "expires_at")
        rows_of(key, alias).update(**{name: F(name) - past for name in moments})


# list


@in_sqlite
def test_list_without_records(shop: str) -> None:
    """An empty table says so; JSON is an empty list; a choice that meets nothing says that."""
    assert run("list") == "There is no record.\n"
    assert listed() == []
    assert run("list", "--state", "done") == run("list", "--prefix", "x") == "No such record.\n"


def test_list_shows_each_record(shop: str) -> None:
    """A record has its key, state and age, who claimed it, and what was wrong if it failed."""
    leave_failed("mail:3", "the mailbox is full", age=300)
    leave_done("mail:2", age=120, ttl=3600)
    leave_running("mail:1", claims=3)
    running, told, by, done, more, ours, failed, last, _, error = run("list").splitlines()
    assert (running, done, failed) == ("mail:1", "mail:2", "mail:3")
    assert re.match(r"    running, claimed \d+\.\ds ago", told)
    assert told.endswith("s ago, lease of 10min, 3 times")
    assert by == "    6f1c, pid 42 on web1"
    assert more == "    done, claimed 2min ago, expires in 58min"
    assert ours == f"    pid {os.getpid()} on {socket.gethostname()}"
    assert last == "    failed, claimed 5min ago, expires in 24h"
    assert error == "    ValueError: the mailbox is full"


@in_sqlite
def test_list_tells_what_never_expires_and_whose_holder_is_gone(shop: str) -> None:
    """Without a ttl nothing is said of an end; a lease that is over is a holder that is gone."""
    leave_done("kept", age=200, ttl=None)
    leave_running("left", age=100, lease=1, holder=Holder())
    assert run("list").splitlines() == [
        "left",
        "    running, its process is gone, claimed 2min ago",
        "    not known",
        "kept",
        "    done, claimed 3min ago",
        f"    pid {os.getpid()} on {socket.gethostname()}",
    ]


@in_sqlite
def test_list_tells_what_expired(shop: str) -> None:
    """Work that would be done again is shown as expired, done or failed."""
    leave_failed("mail:2", age=200, ttl=100)
    leave_done("mail:1", age=100, ttl=1)
    told = [line for line in run("list").splitlines() if "claimed" in line]
    assert told == ["    done, claimed 2min ago, expired", "    failed, claimed 3min ago, expired"]
    assert [row["expires_in_s"] for row in listed()] == [0, 0]


def test_list_as_json(shop: str) -> None:
    """--json has an object for each record, with ages in seconds and what is not known as null."""
    leave_failed("mail:3", age=300)
    leave_done("mail:2", age=120, ttl=3600)
    leave_running("mail:1", claims=3)
    running, done, failed = listed()
    age, left = running.pop("age_s"), running.pop("remaining_s")
    claimed_at = datetime.fromisoformat(running.pop("claimed_at"))
    assert 0 <= age < 60
    assert LEASE - 60 < left <= LEASE
    assert claimed_at.tzinfo is not None
    assert running == {
        "key": "mail:1",
        "state": "running",
        "task": "shop.tasks.charge",
        "task_id": "6f1c",
        "host": "web1",
        "pid": 42,
        "claims": 3,
        "ended_at": None,
        "expires_in_s": None,
        "error": "",
    }
    assert (done["state"], done["task"], done["task_id"]) == ("done", None, None)
    assert (done["host"], done["pid"]) == (socket.gethostname(), os.getpid())
    assert done["remaining_s"] is None
    assert 120 <= done["age_s"] < 180
    assert 3600 - 180 < done["expires_in_s"] <= 3600 - 120
    assert done["ended_at"] >= done["claimed_at"]
    assert (failed["state"], failed["error"]) == ("failed", "ValueError: refused")


@in_sqlite
def test_nobody_is_null_in_json(shop: str) -> None:
    """A holder of whom nothing is known has neither host nor pid; his lease is over: 0 s."""
    leave_running("left", age=100, lease=1, holder=Holder())
    (row,) = listed()
    assert (row["host"], row["pid"], row["remaining_s"]) == (None, None, 0)


def test_list_by_state(shop: str) -> None:
    """--state shows only those in this state."""
    for key in (leave_running("running"), leave_done("done"), leave_failed("failed")):
        assert [row["key"] for row in listed("--state", key)] == [key]
    with pytest.raises(CommandError, match="invalid choice: 'dead'"):
        run("list", "--state", "dead")


def test_list_by_prefix(shop: str) -> None:
    """--prefix shows only keys that begin so, wildcards of SQL taken as they are."""
    for key in ("mail:1", "mail:2", "a-mail:1", "100%:1", "100x:1"):
        leave_done(key)
    leave_running("mail:3")
    assert {row["key"] for row in listed("--prefix", "mail:")} == {"mail:1", "mail:2", "mail:3"}
    assert [row["key"] for row in listed("--prefix", "100%")] == ["100%:1"]
    assert [row["key"] for row in listed("--prefix", "mail", "--state", "running")] == ["mail:3"]
    assert len(listed("--prefix", "")) == 6


def test_a_prefix_is_that_of_the_whole_key(shop: str) -> None:
    """--prefix finds keys that stand in the table as a hash, and no hash by its own beginning."""
    hashed = [LONG_KEY, "mail:größe", "mail: 1", BROKEN_KEY]
    for key in (*hashed, "mail:plain", "sha256"):
        leave_done(key)
    assert keys() == {*map(plain_name, hashed), "mail:plain", "sha256"}

    def found(prefix: str) -> set[str]:
        return {row["key"] for row in listed("--prefix", prefix)}

    assert found("mail:") == {"mail:größe", "mail: 1", BROKEN_KEY, "mail:plain"}
    assert found("mail:grö") == found("mail:gr") == {"mail:größe"}
    assert found("mail: ") == {"mail: 1"}
    assert found(BROKEN_KEY) == {BROKEN_KEY}
    assert found(LONG_KEY) == found(LONG_KEY[:300]) == {LONG_KEY}
    assert found(f"{LONG_KEY}y") == found("größe") == found("sha256:") == set()
    assert found("sha256") == {"sha256"}


def test_a_prefix_is_case_sensitive(shop: str) -> None:
    """Small letters are not large ones, on SQLite neither, whether a key is hashed or not."""
    for key in ("Mail:1", "mail:1", "Mail:ö", "mail:ö"):
        leave_done(key)
    assert {row["key"] for row in listed("--prefix", "mail:")} == {"mail:1", "mail:ö"}
    assert {row["key"] for row in listed("--prefix", "MAIL")} == set()


def test_a_limit_counts_what_has_the_prefix(shop: str) -> None:
    """Newer records that don't begin so use up nothing of --limit, and are no more of them."""
    for age, key in enumerate(("Mail:1", f"other:{LONG_KEY}", "mail:1", "mail:ö", "Mail:2")):
        leave_done(key, age=10 * age)
    two = ("--prefix", "mail:", "--limit", "2")
    assert [row["key"] for row in listed(*two)] == ["mail:1", "mail:ö"]
    assert "There are more" not in run("list", *two)
    one = ("--prefix", "mail:", "--limit", "1")
    assert [row["key"] for row in listed(*one)] == ["mail:1"]
    assert run("list", *one).endswith("There are more: --limit is 1.\n")


def test_list_is_limited(shop: str) -> None:
    """--limit shows the newest ones and says if there are more; 0 shows all."""
    for number in range(4):
        leave_done(f"mail:{number}", age=10 * number)
    assert [row["key"] for row in listed("--limit", "2")] == ["mail:0", "mail:1"]
    assert run("list", "--limit", "2").endswith("There are more: --limit is 2.\n")
    for arguments in ([], ["--limit", "4"], ["--limit", "0"]):
        assert "There are more" not in run("list", *arguments)
    row = rows_of("mail:0").get()
    values = {field.attname: getattr(row, field.attname) for field in row._meta.fields[1:]}
    copies = [IdempotencyRecord(key=f"copy:{number}", **values) for number in range(60)]
    IdempotencyRecord.objects.using(shop).bulk_create(copies)
    assert len(listed()) == 50
    assert len(listed("--limit", "0")) == 64
    with CaptureQueriesContext(connections[shop]) as queries:
        run("list")
    assert [each["sql"][-8:] for each in queries if "ORDER BY" in each["sql"]] == ["LIMIT 51"]
    for text in ("-1", "1.5", "many"):
        why = refused("list", f"--limit={text}")[1]
        assert why == f"Error: argument --limit: '{text}' is not a whole number from 0 on"


@in_sqlite
def test_a_long_key_is_cut_in_the_text(shop: str) -> None:
    """The list shows the beginning of a long key and how long it is; JSON has all of it."""
    leave_done(LONG_KEY)
    first = run("list").splitlines()[0]
    assert first == f"{LONG_KEY[:240]}... ({len(LONG_KEY)} characters; --json shows all)"
    assert listed()[0]["key"] == shown(LONG_KEY)["key"] == LONG_KEY


# show


def test_show_has_all_of_a_record(shop: str) -> None:
    """It has a line for each thing that is known, the result too; - for what is not."""
    leave_done("mail:1", result={"id": SECRET, "copies": [1, None]}, ttl=None)
    title, *rest = run("show", "mail:1").splitlines()
    lines = {line[4:16].strip(): line[16:] for line in rest}
    assert (title, lines["state"], lines["claims"]) == ("mail:1", "done", "1")
    assert (lines["task"], lines["lease left"], lines["expires at"]) == ("-", "-", "-")
    assert lines["process"] == f"pid {os.getpid()} on {socket.gethostname()}"
    assert (lines["error"], shown("mail:1")["error"]) == ("-", "")
    assert json.loads(lines["result"]) == {"id": SECRET, "copies": [1, None]}
    row = shown("mail:1")
    assert row.pop("result") == {"id": SECRET, "copies": [1, None]}
    assert row.keys() == listed()[0].keys()


@in_sqlite
def test_show_of_what_has_no_result(shop: str) -> None:
    """A result of None, and that of what runs, are - and null."""
    for key in (leave_done("none"), leave_running("runs"), leave_failed("failed")):
        assert run("show", key).splitlines()[-1].split() == ["result", "-"]
        assert shown(key)["result"] is None


@in_sqlite
def test_show_of_a_date(shop: str) -> None:
    """A result with a date is shown as it is stored."""
    leave_done("mail:1", result={"at": datetime(2026, 1, 2)})
    assert "2026-01-02" in run("show", "mail:1")
    assert "2026-01-02" in json.dumps(shown("mail:1")["result"])


@in_sqlite
def test_show_of_a_number_that_json_has_not(shop: str) -> None:
    """NaN and infinity are texts: no other language's parser takes what Python makes of them."""
    leave_done("mail:1", result=[float("nan"), float("inf"), 1.5])
    assert shown("mail:1")["result"] == ["NaN", "Infinity", 1.5]


@in_sqlite
def test_show_of_nothing(shop: str) -> None:
    """A key that no record has is an error, also the beginning of one that has."""
    leave_done("mail:1")
    for key in ("mail:2", "mail", "mail:%"):
        assert refused("show", key) == ("", f"There is no record {key!r}.")


@in_sqlite
def test_results_show_nowhere_else(shop: str) -> None:
    """No action but show prints what work returned, in either form."""
    for number in range(3):
        leave_done(f"mail:{number}", result=SECRET)
    outputs = [
        run(*arguments.split())
        for arguments in (
            "list",
            "list --json",
            "forget mail:1 --dry-run",
            "forget mail:1 --no-input",
            "prune --older-than 1h --dry-run",
            "prune --older-than 1h",
        )
    ]
    assert SECRET not in "".join(outputs)
    assert SECRET in run("show", "mail:2")
    assert shown("mail:2")["result"] == SECRET


# Terminals.


@in_sqlite
def test_keys_and_errors_can_not_steer_the_terminal(shop: str) -> None:
    """Control characters in a key, a holder, an error or a result are printed as escapes."""
    key, host = "mail:\x1b[31mred\n\x9b", "web\x1b[2J\r"
    leave_failed(key, "\x1b]0;title\x07\nsecond line")
    leave_running("busy\x1b[0m", holder=Holder(host, 42, task_id="\x1b[1m"))
    assert "mail:\\x1b[31mred\\n\\x9b" in run("list")
    assert "\\x1b[1m, pid 42 on web\\x1b[2J\\r" in run("list")
    assert "\\x1b]0;title\\x07\\nsecond line" in run("list")
    for text in (
        run("list"),
        run("list", "--json"),
        run("show", key),
        run("show", key, "--json"),
        *refused("forget", "--no-input", "busy\x1b[0m", "other\x1b[0m"),
        *refused("show", "other\x1b[0m"),
    ):
        assert all(char.isprintable() for char in text.replace("\n", ""))
    assert [row["key"] for row in listed("--state", "failed")] == [key]
    assert run("forget", "--no-input", key) == "1 record(s) were forgotten.\n"


@in_sqlite
@pytest.mark.parametrize(
    "host",
    ["web-1", "celery-worker-high-priority-7d9c5b8f6d-x2x9k", "h" * 253],
    ids=["short", "pod", "longest"],
)
def test_a_record_fits_80_columns(shop: str, host: str) -> None:
    """State, holder and a long error fit a terminal of 80 columns, indented in each line."""
    task_id = "c6a2a6ab-9de0-49f1-9c6d-3b4a2d0a8a41"
    leave_running("mail:1", age=99, claims=12, holder=Holder(host, 4194304, task_id=task_id))
    leave_failed("mail:2", f"{'the mailbox is full, ' * 30}{'x' * 200}", age=99)
    lines = run("list").splitlines()
    assert len(lines) > 9
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if not line.startswith("    ")] == ["mail:2", "mail:1"]
    said = "".join(line.strip() for line in lines)
    assert host in said
    assert task_id in said


def test_a_key_with_half_of_a_character(shop: str) -> None:
    """A lone surrogate, as a path or an argument may have, crashes no action in either form."""
    leave_done(BROKEN_KEY, result=1)
    leave_running(f"{BROKEN_KEY}:busy")
    assert [row["key"] for row in listed("--state", "done")] == [BROKEN_KEY]
    assert "mail:\\ud800\n" in run("list")
    assert shown(BROKEN_KEY)["result"] == 1
    assert "mail:\\ud800\n" in run("show", BROKEN_KEY)
    assert refused("show", "no\ud800") == ("", "There is no record 'no\\ud800'.")
    assert "There is no record no\\ud800. " in refused("forget", "--no-input", "no\ud800")[1]
    assert (
        "running: mail:\\ud800:busy (" in refused("forget", "--no-input", f"{BROKEN_KEY}:busy")[1]
    )
    assert run("forget", "--no-input", BROKEN_KEY) == "1 record(s) were forgotten.\n"
    assert len(keys()) == 1


# forget


def test_forget_lets_it_be_done_again(shop: str) -> None:
    """Forgotten work is done again at the next call; other records stay."""
    leave_done("mail:1", result=1)
    leave_done("mail:2", result=2)
    leave_failed("mail:3")
    assert run("forget", "--no-input", "mail:1", "mail:3") == "2 record(s) were forgotten.\n"
    assert keys() == {"mail:2"}
    with idempotent("mail:1", using=shop) as claim:
        assert claim


def test_forget_with_dry_run_changes_nothing(shop: str) -> None:
    """--dry-run counts what would be forgotten, and refuses what would be refused."""
    leave_done("mail:1")
    leave_running("mail:2")
    assert run("forget", "mail:1", "--dry-run") == "1 record(s) would be forgotten.\n"
    assert "Still running: mail:2 (" in refused("forget", "mail:1", "mail:2", "--dry-run")[1]
    both = run("forget", "mail:1", "mail:2", "--dry-run", "--force")
    assert both == "2 record(s) would be forgotten.\n"
    assert keys() == {"mail:1", "mail:2"}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
def test_keys_that_are_not_there(shop: str, dry: list[str]) -> None:
    """Unknown keys are named and fail the command; others are forgotten, one named twice once."""
    leave_done("mail:1")
    out, why = refused("forget", "--no-input", "mail:1", "mail:1", "mail:2", "mail", *dry)
    assert out.startswith("1 record(s) ")
    assert why == (
        "There is no record mail:2, mail. `manage.py celery_idempotency list` shows the keys."
    )
    assert keys() == ({"mail:1"} if dry else set())


def test_a_key_given_in_both_forms_is_one(shop: str) -> None:
    """The whole key and its hash name one record; a hash that no record has is named as given."""
    leave_done(LONG_KEY)
    nobody = plain_name("x" * 300)
    out, why = refused("forget", "--no-input", LONG_KEY, plain_name(LONG_KEY), nobody)
    assert out == "1 record(s) were forgotten.\n"
    assert why.startswith(f"There is no record {nobody}. ")


@pytest.mark.parametrize("key", [LONG_KEY, "an order with spaces", "größe:1"])
def test_a_hashed_key_can_be_given_in_both_forms(shop: str, key: str) -> None:
    """A record under a hash is found by the whole key and by the hash."""
    for given in (key, plain_name(key)):
        leave_done(key)
        assert keys() == {plain_name(key)} != {key}
        assert shown(given)["key"] == key
        assert run("forget", "--no-input", given) == "1 record(s) were forgotten.\n"
    assert keys() == set()


def test_what_is_being_done_is_not_forgotten(shop: str) -> None:
    """A running record is named with its key and its process, and nothing is forgotten."""
    leave_done("mail:1")
    leave_running("mail:2")
    leave_running(LONG_KEY, holder=Holder("web2", 43))
    out, why = refused("forget", "--no-input", "mail:1", "mail:2", plain_name(LONG_KEY))
    assert out == ""
    assert why.startswith("Still running: ")
    assert "mail:2 (6f1c, pid 42 on web1)" in why
    assert f"{LONG_KEY} (pid 43 on web2)" in why
    assert "mail:1" not in why
    assert why.endswith("or add --force. Nothing was forgotten.")
    assert keys() == {"mail:1", "mail:2", plain_name(LONG_KEY)}


def test_what_nobody_does_any_more_is_forgotten(shop: str) -> None:
    """One whose lease is over needs no --force."""
    leave_running("mail:1", age=100, lease=1)
    assert run("forget", "--no-input", "mail:1") == "1 record(s) were forgotten.\n"


@pytest.mark.parametrize("shop", ["sqlite"], indirect=True)
def test_forget_asks(shop: str) -> None:
    """forget shows what it is about; only yes is yes, and what was done anew meanwhile stays."""
    for number in range(22):
        leave_done(f"mail:{number}")
    named = sorted(keys())
    out, why = refused("forget", *named)
    assert out == ""
    assert "there is no terminal to ask at: nothing was done. Add --no-input" in why
    for text in ("no\n", "y\n", "\x04"):
        said = answer(text, "celery_idempotency", "forget", "mail:1", "mail:99")[1]
        assert (text, said) == (text, "The answer was not 'yes': nothing was done.")
    with on_terminal("celery_idempotency", "forget", *named) as terminal:
        terminal.wait_for("[yes/no] ")
        assert terminal.text.count("    done, claimed ") == 20
        assert terminal.text.endswith(
            "\n... and 2 more.\n"
            "The work of these records will be done again when it is asked for the next "
            "time.\n"
            "Forget 22 record(s)? [yes/no] "
        )
        assert keys() == set(named)
        run("forget", "mail:1", "--no-input")
        leave_done("mail:1")
        terminal.type("yes\n")
        assert terminal.end() == 1
        assert "\n21 record(s) were forgotten.\n" in terminal.text
        assert "1 record(s) were claimed, or gone, before" in terminal.text
    assert keys() == {"mail:1"}


def test_forced_its_holder_finds_out(shop: str) -> None:
    """With --force a real claim is lost, which its holder sees when it asks or finishes."""
    with pytest.raises(ClaimLost), idempotent("mail:1", using=shop) as claim:
        claim.ensure()
        us = f"pid {os.getpid()} on {socket.gethostname()}"
        assert f"Still running: mail:1 ({us}). " in refused("forget", "--no-input", "mail:1")[1]
        claim.ensure()
        assert run("forget", "--no-input", "--force", "mail:1") == "1 record(s) were forgotten.\n"
        claim.finish()
    assert keys() == set()


@contextmanager
def before_deleting(alias: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Let another thread ``act`` between the command's look and its DELETE; gives the DELETEs."""
    deletes: list[str] = []

    def act_there() -> None:
        try:
            act()
        finally:
            connections[alias].close()

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


@pytest.mark.parametrize("before", ["failed", "gone", "expired"])
def test_one_that_is_claimed_meanwhile_is_not_forgotten(shop: str, before: str) -> None:
    """A claim between the look and the deletion is safe, and the command tells of it."""
    if before == "failed":
        leave_failed("mail:1")
    elif before == "gone":
        leave_running("mail:1", age=100, lease=1)
    else:
        leave_done("mail:1", age=100, ttl=1)
    claims = []

    def claim() -> None:
        store, text = record_table(shop), encode_holder("mail:1", Holder("web2", 43))
        lease = timedelta(seconds=LEASE)
        claims.append(store.at("mail:1").try_claim("new", lease, holder=text, digest="", claims=2))

    with before_deleting(shop, claim) as deletes:
        out, why = refused("forget", "--no-input", "mail:1")
    assert (claims, len(deletes)) == ([True], 1)
    assert out == "0 record(s) were forgotten.\n"
    assert why == (
        "1 record(s) were claimed, or gone, before they could be forgotten. Look at the list again."
    )
    assert rows_of("mail:1").get().token == "new"


def test_one_that_goes_meanwhile_is_told(shop: str) -> None:
    """A record that another deletes before the deletion counts as gone, also with force."""
    for force in ([], ["--force"]):
        leave_done("mail:1")
        with before_deleting(shop, lambda: rows_of("mail:1").delete()) as deletes:
            out, why = refused("forget", "--no-input", "mail:1", *force)
        assert len(deletes) == 1
        assert out == "0 record(s) were forgotten.\n"
        assert why.startswith("1 record(s) were claimed, or gone, ")


def test_a_claim_that_commits_during_the_deletion_is_safe(
    make_database: MakeDatabase, settings: Settings
) -> None:
    """On PostgreSQL the DELETE waits for a claim that is not committed, and leaves its record."""
    settings.DATABASE_ROUTERS = [f"{__name__}.InShop"]
    alias = make_database("postgres", "shop")
    leave_failed("mail:1")
    is_claimed = threading.Event()

    def somebody_waits() -> bool:
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
            return bool(cursor.fetchone()[0])

    def claim() -> None:
        text, lease = encode_holder("mail:1", Holder("web2", 43)), timedelta(seconds=LEASE)
        row = record_table(alias).at("mail:1")
        with closing(connections[alias]), transaction.atomic(using=alias):
            assert row.try_claim("new", lease, holder=text, digest="", claims=2)
            is_claimed.set()
            wait_for(somebody_waits, 20)

    with ThreadPoolExecutor(1) as pool:
        claimed = pool.submit(claim)
        assert is_claimed.wait(20)
        out, why = refused("forget", "--no-input", "mail:1")
        claimed.result()
    assert out == "0 record(s) were forgotten.\n"
    assert why.startswith("1 record(s) were claimed, or gone, ")
    assert rows_of("mail:1").get().token == "new"


# prune


def leave_each(*, age: float, ttl: float) -> None:
    """Let there be a record of each kind, begun ``age`` s ago, that lasts ``ttl`` s."""
    leave_done("done", age=age, ttl=ttl)
    leave_failed("failed", age=age, ttl=ttl)
    leave_done("kept", age=age, ttl=None)
    leave_running("left", age=age, lease=1)
    leave_running("runs", age=age, lease=age + LEASE)


def test_prune_deletes_what_says_nothing_any_more(shop: str) -> None:
    """Expired records are deleted; those that run, still last, or never expire, stay."""
    leave_each(age=100, ttl=50)
    leave_done("lasts", age=100, ttl=DAY)
    assert run("prune", "--dry-run") == "2 record(s) would be deleted.\n"
    assert len(keys()) == 6
    assert run("prune") == "2 record(s) were deleted.\n"
    assert keys() == {"kept", "left", "runs", "lasts"}
    assert run("prune") == "0 record(s) were deleted.\n"


def test_abandoned_ones_go_after_the_retention(shop: str, settings: Settings) -> None:
    """A dead process's record is deleted an IDEMPOTENCY_RETENTION later; None: never."""
    leave_running("left", age=1000, lease=1)
    leave_running("runs", age=1000, lease=1000 + LEASE)
    assert run("prune").startswith("0 record(s)")
    settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": None}
    assert run("prune").startswith("0 record(s)")
    settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": 1100}
    assert run("prune").startswith("0 record(s)")
    settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": timedelta(seconds=900)}
    assert run("prune").startswith("1 record(s)")
    assert keys() == {"runs"}


def test_the_retention_is_seven_days(shop: str) -> None:
    """Without the setting an abandoned record stays for a week."""
    leave_running("old", age=8 * DAY, lease=1)
    leave_running("young", age=6 * DAY, lease=1)
    run("prune")
    assert keys() == {"young"}


def test_prune_by_age(shop: str) -> None:
    """--older-than counts from the end, whatever the ttl; a running record stays at any age."""
    leave_each(age=100, ttl=DAY)
    leave_done("young", age=1, ttl=0.5)
    assert run("prune", "--older-than", "200") == "0 record(s) were deleted.\n"
    assert run("prune", "--older-than", "50", "--dry-run").startswith("4 record(s) would")
    assert run("prune", "--older-than", "50").startswith("4 record(s) were")
    assert keys() == {"runs", "young"}
    assert run("prune", "--older-than", "0").startswith("1 record(s) were")
    assert keys() == {"runs"}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("90", 90),
        ("1.5m", 90),
        ("15m", 900),
        ("12h", 43_200),
        ("7d", 604_800),
        ("2w", 1_209_600),
    ],
)
def test_ages_have_units(
    make_database: MakeDatabase, settings: Settings, text: str, seconds: float
) -> None:
    """A record a little older than the limit is pruned, and a little younger one is not."""
    settings.DATABASE_ROUTERS = [f"{__name__}.InShop"]
    make_database("sqlite-immediate", "shop")
    leave_done("old", age=seconds + 10)
    leave_done("young", age=seconds - 30)
    run("prune", "--older-than", text)
    assert keys() == {"young"}


@pytest.mark.parametrize("text", ["", "-1", "7 d", "7days", "d", "nan", "inf", "1e3", "9" * 400])
def test_an_age_that_is_none_is_refused(
    make_database: MakeDatabase, settings: Settings, text: str
) -> None:
    """--older-than has to be a time that a date can be away, and nothing is deleted."""
    settings.DATABASE_ROUTERS = [f"{__name__}.InShop"]
    make_database("sqlite-immediate", "shop")
    leave_done("old", age=100, ttl=1)
    why = refused("prune", f"--older-than={text}")[1]
    assert f"argument --older-than: '{text}' is not a valid time; write" in why
    assert keys() == {"old"}


def test_a_retention_that_means_nothing(shop: str, settings: Settings) -> None:
    """It fails prune and the task with its name; an age that is given needs no setting."""
    leave_done("old", age=100)
    settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": "a week"}
    assert "IDEMPOTENCY_RETENTION='a week'" in refused("prune")[1]
    with pytest.raises(ConfigurationError, match="IDEMPOTENCY_RETENTION='a week'"):
        prune_idempotency()
    assert keys() == {"old"}
    assert run("prune", "--older-than", "50").startswith("1 record(s)")


# The task, and what it asks.


def test_what_is_prunable(shop: str, settings: Settings) -> None:
    """get_prunable chooses and deletes nothing: by the records' own end, or by age."""
    records = IdempotencyRecord.objects.using(shop)
    leave_each(age=100, ttl=50)

    def prunable(older_than: timedelta | None = None) -> set[str]:
        return {row.key for row in get_prunable(records.all(), older_than)}

    assert prunable() == {"done", "failed"}
    assert prunable(timedelta(seconds=50)) == {"done", "failed", "kept", "left"}
    assert prunable(timedelta(seconds=500)) == set()
    assert prunable(timedelta()) == {"done", "failed", "kept", "left"}
    settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": 50}
    assert prunable() == {"done", "failed", "left"}
    assert len(keys()) == 5


def test_the_task_prunes_and_counts(shop: str, settings: Settings) -> None:
    """It deletes in the database that the router writes to, and returns how many."""
    leave_each(age=100, ttl=50)
    assert prune_idempotency() == 2
    assert keys() == {"kept", "left", "runs"}
    settings.DJANGO_CELERY_SAFE = {"IDEMPOTENCY_RETENTION": 50}
    assert prune_idempotency() == 1
    assert prune_idempotency() == 0
    assert keys() == {"kept", "runs"}


def test_what_is_pruned_can_be_done_again(shop: str) -> None:
    """A record that expired keeps nothing from being done, before it is pruned and after."""
    leave_done("mail:1", age=100, ttl=1)
    prune_idempotency()
    with idempotent("mail:1", using=shop) as claim:
        assert claim


@pytest.mark.parametrize("shop", ["postgres"], indirect=True)
def test_the_task_on_a_worker(shop: str, broker: Celery) -> None:
    """A worker that has the package's tasks runs it by its name, as beat sends it."""
    assert prune_idempotency.name == PRUNE_TASK
    leave_each(age=100, ttl=50)
    arguments = ["--include", "django_celery_safe.tasks"]
    with CeleryWorker("tests.app", concurrency=1, arguments=arguments):
        broker.send_task(PRUNE_TASK)
        wait_for(lambda: keys() == {"kept", "left", "runs"}, 20)


# Refusals and errors


ACTIONS = ("list", "show mail:1", "forget mail:1", "prune", "prune --older-than 7d --dry-run")


def test_another_database(shop: str, make_database: MakeDatabase) -> None:
    """--database names another than the router's, before the action or after it."""
    make_database("sqlite", "other")
    leave_done("here")
    leave_done("there", alias="other")
    leave_done("gone", age=100, ttl=1, alias="other")
    assert [row["key"] for row in listed()] == ["here"]
    assert {row["key"] for row in listed("--database", "other")} == {"there", "gone"}
    assert "there" in run("--database", "other", "list")
    assert shown("there", "--database", "other")["state"] == "done"
    assert "There is no record" in refused("show", "there")[1]
    assert run("prune").startswith("0 record(s)")
    assert run("prune", "--database", "other").startswith("1 record(s)")
    assert run("forget", "--no-input", "there", "--database", "other").startswith("1 record(s)")
    assert (keys(), keys("other")) == ({"here"}, set())


def test_several_databases(shop: str, make_database: MakeDatabase) -> None:
    """--database given twice means both, one after the other; --limit is of all together."""
    make_database("sqlite", "other")
    both = ["--database", "shop", "--database", "other"]
    for alias in (shop, "other"):
        leave_done(f"old-{alias}", age=100, ttl=1, alias=alias)
        leave_done(f"new-{alias}", alias=alias)
    everywhere = ["new-shop", "old-shop", "new-other", "old-other"]
    assert [row["key"] for row in listed(*both)] == everywhere
    assert [row["key"] for row in listed(*both, "--limit", "3")] == everywhere[:3]
    assert run("list", *both, "--limit", "2").endswith("There are more: --limit is 2.\n")
    assert "There are more" not in run("list", *both, "--limit", "4")
    assert shown("new-other", *both)["state"] == "done"
    assert run("prune", *both, "--dry-run").startswith("2 record(s)")
    assert run("prune", *both).startswith("2 record(s)")
    leave_running("runs", alias="other")
    assert "Still running: runs (" in refused("forget", "--no-input", "new-shop", "runs", *both)[1]
    assert keys() == {"new-shop"}
    assert run("forget", "--no-input", "new-shop", "new-other", *both).startswith("2 record(s)")
    assert (keys(), keys("other")) == (set(), {"runs"})


@in_sqlite
@pytest.mark.parametrize("action", ACTIONS)
def test_an_unknown_database(shop: str, action: str) -> None:
    """An alias that DATABASES does not have is refused with those that it has."""
    why = refused(*action.split(), "--database", "nope")[1]
    assert why == "DATABASES has no 'nope'; it has default, shop."


def test_a_missing_table_hints_at_migrate(shop: str) -> None:
    """Where the table is missing, each action says what to run, and for which database."""
    with connections[shop].schema_editor() as editor:
        editor.delete_model(IdempotencyRecord)
    for action in ACTIONS:
        out, why = refused(*action.split())
        assert out == ""
        assert why.startswith("The database 'shop' has no table for the records (")
        assert "django_celery_safe_idempotencyrecord" in why
        assert why.endswith("). Run manage.py migrate --database=shop.")
        assert "\n" not in why


def test_a_database_without_the_table(shop: str, tmp_path: Path) -> None:
    """The database that was never migrated is named, with the command to run."""
    with registered("empty", sqlite_settings(tmp_path / "empty.sqlite3", "sqlite")):
        why = refused("list", "--database", "shop", "--database", "empty")[1]
    assert why.startswith("The database 'empty' has no table for the records (")
    assert why.endswith("). Run manage.py migrate --database=empty.")


@pytest.fixture
def stranger(postgres_server: PostgresServer) -> Iterator[str]:
    """A user of the private PostgreSQL who may connect, and no more."""
    name = f"stranger_{uuid.uuid4().hex}"
    user = Identifier(name)
    with postgres_server.connect() as connection:
        connection.execute(SQL("CREATE ROLE {} LOGIN").format(user))
        yield name
        connection.execute(SQL("DROP ROLE {}").format(user))


def test_who_may_not_read_the_table(make_database: MakeDatabase, stranger: str) -> None:
    """A table that may not be read is there: the error says so, and does not hint at migrate."""
    make_database("postgres", "shop")
    names = ("ENGINE", "NAME", "HOST", "PORT")
    database = {name: connections.settings["shop"][name] for name in names}
    with registered("strange", {**database, "USER": stranger}):
        for action in ACTIONS:
            out, why = refused(*action.split(), "--database", "strange")
            assert out == ""
            assert why.startswith("The database can't be asked, of strange: ")
            assert "permission denied for table django_celery_safe_idempotencyrecord" in why
            assert "migrate" not in why


@pytest.mark.parametrize("action", ACTIONS)
def test_a_database_that_is_gone(
    make_database: MakeDatabase, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    """A database that does not answer fails each action with one sentence, not with migrate."""
    assert make_database
    with registered("gone", gone_settings()):
        assert status_of_program(*action.split(), "--database", "gone") == 1
    out, err = capsys.readouterr()
    assert err.startswith("CommandError: The database ")
    assert "can't be asked" in err
    assert "gone" in err
    assert "migrate" not in err
    assert out == ""


@pytest.mark.parametrize("action", ["", "list", "show", "forget", "prune"])
def test_help_reads_well(capsys: pytest.CaptureFixture[str], action: str) -> None:
    """--help names the actions, and for each one what it does."""
    commands.check_help("celery_idempotency", action, "{list,show,forget,prune}", capsys)


@in_sqlite
def test_it_needs_an_action_and_keys(shop: str) -> None:
    """Without an action, or keys to show or forget, nothing is done."""
    leave_done("mail:1")
    for arguments in ([], ["show"], ["forget"], ["forget", "--force"]):
        assert "required" in refused(*arguments)[1]
    assert keys() == {"mail:1"}
