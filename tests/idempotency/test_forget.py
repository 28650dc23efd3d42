"""forget_record: work is done again at the next call, unless a process does it now."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
from django.db import connections, transaction

from django_celery_safe import AlreadyClaimed, forget_record
from django_celery_safe.idempotency.records import record_table
from django_celery_safe.leases.holder import Holder, encode_holder, plain_name
from tests.idempotency.test_claims import do
from tests.servers.databases import until_somebody_waits

#: A lease that no test outlasts.
LEASE = timedelta(hours=10)


def begin(key: str, alias: str, lease: timedelta = LEASE) -> None:
    """Let another process have begun the work of a key."""
    holder = encode_holder(key, Holder("web1", 42, task="shop.tasks.charge", task_id="6f1c"))
    facts = {"token": key[:32], "holder": holder, "digest": "", "lease": lease.total_seconds()}
    assert record_table(alias).execute("add_record", key, **facts)


@pytest.mark.parametrize("key", ["mail:1", "an order of größe", "x" * 300])
def test_forgotten_work_is_done_again(
    db_alias: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its record goes, which is logged with the whole key; other records stay."""
    caplog.set_level(logging.INFO, "django_celery_safe.record_forgotten")
    assert do(key, using=db_alias)
    assert do("mail:2", using=db_alias)
    assert forget_record(plain_name(key), using=db_alias)
    assert not forget_record(key, using=db_alias)
    assert [do(key, using=db_alias), do("mail:2", using=db_alias)] == [True, False]
    assert forget_record(key, using=db_alias)
    assert [vars(record)["safe_key"] for record in caplog.records] == [key, key]


def test_work_that_runs_is_not_forgotten(db_alias: str) -> None:
    """Its process is named; work whose process died is forgotten."""
    begin("mail:1", db_alias)
    with pytest.raises(AlreadyClaimed, match=r"done by task 6f1c .* in process 42 on web1"):
        forget_record("mail:1", using=db_alias)
    assert record_table(db_alias).find("mail:1") is not None
    begin("mail:2", db_alias, timedelta(seconds=-1))
    assert forget_record("mail:2", using=db_alias)


@pytest.mark.sql
def test_a_claim_that_commits_meanwhile_is_safe(postgres_alias: str) -> None:
    """The DELETE waits for a claim that is not committed, and leaves its record."""
    begin("mail:1", postgres_alias, timedelta(seconds=-1))
    row = record_table(postgres_alias).at("mail:1")

    def forget() -> bool:
        with closing(connections[postgres_alias]):
            return forget_record("mail:1", using=postgres_alias)

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic(using=postgres_alias):
            holder = encode_holder("mail:1", Holder("web2", 43))
            facts = {"holder": holder, "digest": "", "lease": LEASE.total_seconds()}
            table = record_table(postgres_alias)
            assert table.execute("claim_record", "mail:1", token="new", **facts)
            forgotten = pool.submit(forget)
            until_somebody_waits(postgres_alias)
        with pytest.raises(AlreadyClaimed):
            forgotten.result()
    assert row.get().token == "new"
