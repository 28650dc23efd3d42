"""do_once on one connection: its rows, its flags and its errors."""

import uuid
from datetime import datetime
from typing import Any

import pytest
from celery.exceptions import Reject, Retry
from django.db import transaction
from django.db.migrations.writer import MigrationWriter
from django.test import TestCase
from model_bakery import baker
from pytest_django import Settings

from django_celery_safe import ConfigurationError, IdempotentMixin, WrongTransaction
from django_celery_safe.signals import once_failed
from tests.app.models import Account, Customer, Guest, Person, Ticket, Voucher
from tests.conftest import MakeDatabase
from tests.routing import AllIn
from tests.sending.conftest import hearing, rolled_back

FLAG = "is_welcome_email_sent"


@pytest.fixture
def person(db: None) -> Person:
    """A person for whom nothing was done."""
    return baker.make(Person)


def row_for(model: Any, pk: object, flag: str = FLAG, **options: Any) -> Any:
    """Return the row that a block gets that does nothing; None: it was done before."""
    with model.do_once(pk, flag, **options) as row:
        return row


def enter(model: Any, pk: object, flag: str = FLAG, **options: Any) -> None:
    """Enter a block that must not run."""
    with model.do_once(pk, flag, **options):
        pytest.fail("the block ran")


@pytest.mark.parametrize(
    ("flag", "undone", "kind"), [(FLAG, False, bool), ("invited_at", None, datetime)]
)
def test_the_block_gets_the_row_once(flag: str, undone: Any, kind: type, person: Person) -> None:
    """The first block gets the fresh row, every later one None; a flag may be a moment."""
    with Person.do_once(person.pk, flag) as row:
        assert (row, getattr(row, flag)) == (person, undone)
        row.email = "unsaved@example.org"
    after = Person.everyone.get(pk=person.pk)
    assert after.email == person.email  # only the flag is saved
    stored = getattr(after, flag)
    assert stored
    assert isinstance(stored, kind)
    assert getattr(row, flag) == stored
    assert row_for(Person, person.pk, flag) is None


@pytest.mark.parametrize("error", [ValueError("no"), Retry("later")])
def test_a_failed_block_is_not_done(person: Person, error: Exception) -> None:
    """An error in the block, Retry too, leaves the flag unset and takes the block's writes back."""
    with hearing(once_failed) as told, pytest.raises(type(error)), Person.do_once(person.pk, FLAG):
        Person.everyone.filter(pk=person.pk).update(email="changed@example.org")
        raise error
    stored = Person.everyone.get(pk=person.pk)
    assert stored.is_welcome_email_sent is False
    assert stored.email == person.email
    assert told == []  # the next delivery does it


def test_at_most_once_sets_the_flag_first(person: Person) -> None:
    """The flag is stored when the block begins, and stays when it fails, which is signalled."""
    with (
        hearing(once_failed) as failures,
        pytest.raises(ValueError, match="no") as caught,
        Person.do_once(person.pk, FLAG, guarantee="at_most_once"),
    ):
        assert Person.everyone.get(pk=person.pk).is_welcome_email_sent is True
        raise ValueError("no")
    assert [(one["pk"], one["error"]) for one in failures] == [(person.pk, caught.value)]
    assert row_for(Person, person.pk, guarantee="at_most_once") is None


def test_inside_another_transaction_is_refused(person: Person) -> None:
    """Inside atomic() do_once is refused, because a rollback would take the flag back."""
    with transaction.atomic(), pytest.raises(WrongTransaction, match="inside another transaction"):
        enter(Person, person.pk)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("is_welcome_mail_sent", "Did you mean 'is_welcome_email_sent'"),
        ("email", "a BooleanField"),
        ("joined_at", "a DateTimeField with null=True"),
    ],
)
def test_what_is_no_flag_is_refused(person: Person, flag: str, message: str) -> None:
    """A field that does not exist or can't be a flag is refused, with the flags that there are."""
    with pytest.raises(ConfigurationError, match=message):
        enter(Person, person.pk, flag)


def test_a_missing_row_is_the_models_own_error(db: None) -> None:
    """A primary key that does not exist raises the model's DoesNotExist."""
    with pytest.raises(Person.DoesNotExist):
        enter(Person, 12345)


@pytest.mark.parametrize(
    "options", [{"guarantee": "exactly_once"}, {"guarantee": "at_most_once", "durable": False}]
)
def test_contradicting_options_are_refused(person: Person, options: dict[str, object]) -> None:
    """A guarantee that can't be kept is refused before anything happens."""
    with pytest.raises(ConfigurationError):
        Person.do_once(person.pk, FLAG, **options)  # type: ignore[arg-type]


def test_migrations_name_the_public_path() -> None:
    """A migration that lists the mixin among a model's bases imports it from the front door."""
    text, imports = MigrationWriter.serialize(IdempotentMixin)
    assert text == "django_celery_safe.IdempotentMixin"
    assert imports == {"import django_celery_safe"}


class InPlainTestCase(TestCase):
    """Django's TestCase wraps each test in atomic(); that does not count."""

    def test_do_once_works(self) -> None:
        """do_once needs no TransactionTestCase."""
        assert row_for(Person, baker.make(Person).pk) is not None


def test_flags_of_parent_and_child(db: None) -> None:
    """With multi-table inheritance the flag of the parent and that of the child both work."""
    customer = Customer.objects.create()
    for flag in (FLAG, "is_invoiced", "reminded_at"):
        assert type(row_for(Customer, customer.pk, flag)) is Customer
        assert row_for(Customer, customer.pk, flag) is None
    # The parent's row is one thing, by whichever class it is asked for.
    assert row_for(Account, customer.pk) is None
    customer.refresh_from_db()
    assert (customer.is_welcome_email_sent, customer.is_invoiced) == (True, True)


@pytest.mark.parametrize(
    ("model", "pk", "flag"),
    [(Ticket, str(uuid.UUID(int=7)), "is_printed"), (Voucher, "SUMMER/26 é", "is_redeemed")],
)
def test_any_primary_key_will_do(model: Any, pk: object, flag: str, db: None) -> None:
    """A UUID, as itself or as text, and a text name a row as a number does."""
    model.objects.create(pk=pk)
    model.objects.create(pk=uuid.UUID(int=8) if model is Ticket else "other")
    assert str(row_for(model, pk, flag).pk) == str(pk)
    assert row_for(model, pk, flag) is None
    assert model.objects.filter(**{flag: True}).count() == 1


def test_a_base_manager_that_hides_rows_hides_none_here(db: None) -> None:
    """do_once uses neither the default manager nor the base manager of the model."""
    guest = Guest.everyone.create()
    assert not Guest._base_manager.exists()
    assert row_for(Guest, guest.pk, "is_greeted") == guest
    assert row_for(Guest, guest.pk, "is_greeted") is None


@pytest.fixture
def two_databases(make_database: MakeDatabase, settings: Settings) -> tuple[str, str]:
    """The aliases of a writer and of what a router reads from; both have person 1, undone."""
    writer, replica = make_database("sqlite"), make_database("sqlite")
    for alias in (writer, replica):
        Person.everyone.using(alias).create(pk=1)
    settings.DATABASE_ROUTERS = [AllIn(writer, replica)]
    return writer, replica


@pytest.mark.parametrize("guarantee", ["at_least_once", "at_most_once"])
def test_a_replica_is_never_read(guarantee: Any, two_databases: tuple[str, str]) -> None:
    """With a router that reads from a replica, row and flag are those of the writer."""
    writer, replica = two_databases
    Person.everyone.using(replica).update(is_welcome_email_sent=True)
    assert row_for(Person, 1, guarantee=guarantee)._state.db == writer
    Person.everyone.using(replica).update(is_welcome_email_sent=False)
    assert row_for(Person, 1, guarantee=guarantee) is None
    assert Person.everyone.using(writer).get(pk=1).is_welcome_email_sent is True
    assert Person.everyone.using(replica).get(pk=1).is_welcome_email_sent is False


def test_a_transaction_elsewhere_does_not_matter(two_databases: tuple[str, str]) -> None:
    """Inside ``atomic()`` of another database do_once is the outermost of its own."""
    writer, replica = two_databases
    with transaction.atomic(using=replica):
        assert row_for(Person, 1, using=writer) is not None


@pytest.mark.parametrize("wish", [Retry("later"), Reject("busy", requeue=True)])
def test_a_wish_to_run_again_is_an_error_under_at_most_once(
    person: Person, wish: Exception
) -> None:
    """Retry, and Reject that gives the message back, would find the flag set: both are errors."""
    with (
        hearing(once_failed) as failures,
        pytest.raises(ConfigurationError, match="asked for a retry") as caught,
        Person.do_once(person.pk, FLAG, guarantee="at_most_once"),
    ):
        raise wish
    assert caught.value.__cause__ is wish
    assert [failure["error"] for failure in failures] == [wish]


def test_an_outer_transaction_decides_without_durable(person: Person) -> None:
    """With durable=False a rollback of the outer transaction takes the flag back."""
    with rolled_back():
        assert row_for(Person, person.pk, durable=False) == person
    assert row_for(Person, person.pk) == person
