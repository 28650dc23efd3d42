"""A schema of PostgreSQL for each tenant, with the app's tables in the shared one or in each."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings

from django_celery_safe import cache_lock, idempotent
from tests.app.models import Person
from tests.app.tasks import add
from tests.locks.renewals import wait_for_renewals
from tests.sending.conftest import dying_sender, ids, make_due, sent, table
from tests.sending.published import Sent
from tests.sending.test_relay import drain
from tests.servers.databases import registered

__all__ = ["sent"]

TENANTS = ("acme", "globex")


@contextmanager
def tenants_of(alias: str, path: str) -> Iterator[None]:
    """Have an alias for each tenant's schema, beside that of the whole database."""
    with ExitStack() as stack:
        for tenant in TENANTS:
            with connections[alias].cursor() as cursor:
                cursor.execute(f"CREATE SCHEMA {tenant}")
                cursor.execute(f"CREATE TABLE {tenant}.app_person (LIKE app_person INCLUDING ALL)")
            options = {"options": f"-c search_path={path.format(tenant=tenant)}"}
            database = {**connections.settings[alias], "OPTIONS": options}
            stack.enter_context(registered(tenant, database))
        connections[alias].close()
        yield


@pytest.fixture
def shared(postgres_alias: str) -> Iterator[str]:
    """Tenants whose data are apart, and who share the app's tables; gives the alias of these."""
    with tenants_of(postgres_alias, "{tenant},public"):
        yield postgres_alias


@pytest.fixture
def apart(postgres_alias: str) -> Iterator[None]:
    """Tenants with the app's tables in the schema of each."""
    with tenants_of(postgres_alias, "{tenant}"):
        for tenant in TENANTS:
            call_command("migrate", "django_celery_safe", database=tenant, verbosity=0)
        yield


def both_get_it(name: str) -> bool:
    """Return whether the second tenant gets a lock that the first holds."""
    locks = {tenant: cache_lock(name.format(tenant=tenant)) for tenant in TENANTS}
    got = []
    with ExitStack() as stack:
        for tenant, lock in locks.items():
            with override_settings(DJANGO_CELERY_SAFE={"LOCK_DATABASE": tenant}):
                got.append(bool(stack.enter_context(lock)))
    return got == [True, True]


def both_do_it(key: str) -> bool:
    """Return whether the second tenant does what the first has done."""
    done = []
    for tenant in TENANTS:
        with idempotent(key.format(tenant=tenant), using=tenant) as claim:
            done.append(bool(claim))
    return done == [True, True]


def test_names_keep_tenants_apart(shared: str) -> None:
    """In the shared schema, locks and keys meet unless they name the tenant."""
    for ask in (both_get_it, both_do_it):
        assert ask("{tenant}:import:42")
        assert not ask("import:42")


def test_tables_of_their_own_keep_tenants_apart(apart: None) -> None:
    """With the tables in each schema, equal names are locks and keys of each tenant's own."""
    assert both_get_it("import:42")
    assert both_do_it("import:42")


def write_and_send(tenant: str) -> str:
    """Write a tenant's row, and send a task in its transaction, as a process that dies then."""
    with dying_sender(tenant):
        Person.everyone.using(tenant).create()
        result = add.apply_async_on_commit((1,), using=tenant, outbox=True)
    return str(result.id)


def test_one_outbox(shared: str, sent: Sent) -> None:
    """The data are each tenant's own, the messages are in one outbox, and one relay sends all."""
    wanted = [write_and_send(tenant) for tenant in TENANTS]
    with pytest.raises(ValueError, match="no"), transaction.atomic(using="acme"):
        add.apply_async_on_commit((2,), using="acme", outbox=True)
        raise ValueError("no")
    assert [Person.everyone.using(tenant).count() for tenant in TENANTS] == [1, 1]
    assert not Person.everyone.using(shared).exists()
    make_due(shared)
    assert drain(shared) == 2
    assert ids(sent()) == wanted


def test_an_outbox_for_each(apart: None, sent: Sent) -> None:
    """A relay sends what is in the schema of its alias, and leaves that of others."""
    wanted = {tenant: write_and_send(tenant) for tenant in TENANTS}
    for tenant in TENANTS:
        make_due(tenant)
    for tenant in TENANTS:
        assert drain(tenant) == 1
        assert ids(sent()) == [wanted[tenant]]
        assert not table(tenant).exists()


def test_a_connection_that_is_switched(shared: str) -> None:
    """With the tables in the shared schema, the thread that renews need not know the tenant."""
    with closing(connections[shared]) as connection:
        with connection.cursor() as cursor:
            cursor.execute("SET search_path TO acme, public")
        with idempotent("acme:invoice:1", timeout=3, using=shared) as claim:
            Person.everyone.using(shared).create()
            wait_for_renewals()
            claim.ensure()
    assert Person.everyone.using("acme").count() == 1
