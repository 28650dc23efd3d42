"""do_once on one connection: what it yields, sets, refuses and says."""

import pickle
from datetime import datetime

import pytest
from celery.exceptions import Retry
from django.db import transaction
from django.db.migrations.writer import MigrationWriter
from django.test import TestCase
from model_bakery import baker

from django_celery_safe import (
    ConfigurationError,
    IdempotencyError,
    IdempotentMixin,
    WrongTransaction,
)
from django_celery_safe.signals import already_done, done_once
from tests.app.models import Person


@pytest.fixture
def person(db: None) -> Person:
    """A person for whom nothing was done."""
    return baker.make(Person)


def test_the_block_gets_the_row_once(person: Person) -> None:
    """The first block gets the fresh row, every later one gets None."""
    with Person.do_once(person.pk, "is_welcome_email_sent") as row:
        assert row == person
        assert row.is_welcome_email_sent is False
    assert row.is_welcome_email_sent is True
    with Person.do_once(person.pk, "is_welcome_email_sent") as row:
        assert row is None
    assert Person.everyone.get(pk=person.pk).is_welcome_email_sent is True


def test_flags_are_apart(person: Person) -> None:
    """One flag says nothing about another of the same row."""
    with Person.do_once(person.pk, "is_welcome_email_sent"):
        pass
    with Person.do_once(person.pk, "is_badge_printed") as row:
        assert row is not None


def test_a_moment_is_a_flag(person: Person) -> None:
    """A nullable DateTimeField is set to the moment of the end of the block."""
    with Person.do_once(person.pk, "invited_at") as row:
        assert row is not None
    stored = Person.everyone.get(pk=person.pk).invited_at
    assert isinstance(stored, datetime)
    with Person.do_once(person.pk, "invited_at") as row:
        assert row is None


@pytest.mark.parametrize("error", [ValueError("no"), Retry("later")])
def test_a_failed_block_is_not_done(person: Person, error: Exception) -> None:
    """An error in the block, Retry too, leaves the flag unset and takes the block's writes back."""
    with pytest.raises(type(error)), Person.do_once(person.pk, "is_welcome_email_sent") as row:
        assert row is not None
        Person.everyone.filter(pk=person.pk).update(email="changed@example.org")
        raise error
    stored = Person.everyone.get(pk=person.pk)
    assert stored.is_welcome_email_sent is False
    assert stored.email == person.email


def test_only_the_flag_is_saved(person: Person) -> None:
    """What the block changes on the row and does not save is not saved."""
    with Person.do_once(person.pk, "is_welcome_email_sent") as row:
        assert row is not None
        row.email = "unsaved@example.org"
    assert Person.everyone.get(pk=person.pk).email == person.email


def test_the_block_may_delete_its_row(person: Person) -> None:
    """A block that deletes the row ends well."""
    with Person.do_once(person.pk, "is_welcome_email_sent") as row:
        assert row is not None
        row.delete()
    assert not Person.everyone.filter(pk=person.pk).exists()


def test_at_most_once_sets_the_flag_first(person: Person) -> None:
    """Under at_most_once the flag is stored when the block begins, and stays when it fails."""
    with (
        pytest.raises(ValueError, match="no"),
        Person.do_once(person.pk, "is_welcome_email_sent", guarantee="at_most_once") as row,
    ):
        assert row is not None
        assert Person.everyone.get(pk=person.pk).is_welcome_email_sent is True
        raise ValueError("no")
    with Person.do_once(person.pk, "is_welcome_email_sent", guarantee="at_most_once") as row:
        assert row is None


def test_retry_under_at_most_once_is_an_error(person: Person) -> None:
    """A Retry under at_most_once would never send, and is told so."""
    with (
        pytest.raises(IdempotencyError, match="find is_welcome_email_sent set and do nothing"),
        Person.do_once(person.pk, "is_welcome_email_sent", guarantee="at_most_once"),
    ):
        raise Retry("later")


def test_inside_another_transaction_is_refused(person: Person) -> None:
    """Inside atomic() do_once is refused, unless durable=False lets the outer one decide."""
    with transaction.atomic():
        with (
            pytest.raises(WrongTransaction, match="inside another transaction") as caught,
            Person.do_once(person.pk, "is_welcome_email_sent"),
        ):
            pytest.fail("the block ran")
        with Person.do_once(person.pk, "is_welcome_email_sent", durable=False) as row:
            assert row is not None
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("is_welcome_mail_sent", "does not exist.*Did you mean 'is_welcome_email_sent'"),
        ("email", "is a EmailField"),
        ("joined_at", "is a DateTimeField without null=True"),
    ],
)
def test_what_is_no_flag_is_refused(person: Person, flag: str, message: str) -> None:
    """A field that does not exist or can't be a flag is named, with the flags that there are."""
    with (
        pytest.raises(ConfigurationError, match=message),
        Person.do_once(person.pk, flag),
    ):
        pytest.fail("the block ran")


def test_a_missing_row_is_the_models_own_error(db: None) -> None:
    """A primary key that does not exist raises the model's DoesNotExist."""
    with pytest.raises(Person.DoesNotExist), Person.do_once(12345, "is_welcome_email_sent"):
        pytest.fail("the block ran")


@pytest.mark.parametrize(
    "options", [{"guarantee": "exactly_once"}, {"guarantee": "at_most_once", "durable": False}]
)
def test_contradicting_options_are_refused(person: Person, options: dict[str, object]) -> None:
    """A guarantee that can't be kept is refused before anything happens."""
    with pytest.raises(ConfigurationError):
        Person.do_once(person.pk, "is_welcome_email_sent", **options)  # type: ignore[arg-type]


def test_each_end_is_signalled(person: Person) -> None:
    """done_once tells of the first, already_done of every later one."""
    told: list[tuple[str, object]] = []

    def on_done(sender: object, pk: object, flag: str, **fields: object) -> None:
        told.append(("done", pk))

    def on_repeat(sender: object, pk: object, flag: str, **fields: object) -> None:
        told.append(("repeat", pk))

    done_once.connect(on_done)
    already_done.connect(on_repeat)
    try:
        for _ in range(2):
            with Person.do_once(person.pk, "is_welcome_email_sent"):
                pass
    finally:
        done_once.disconnect(on_done)
        already_done.disconnect(on_repeat)
    assert told == [("done", person.pk), ("repeat", person.pk)]


def test_migrations_name_the_public_path() -> None:
    """A migration that lists the mixin among a model's bases imports it from the front door."""
    text, imports = MigrationWriter.serialize(IdempotentMixin)
    assert text == "django_celery_safe.IdempotentMixin"
    assert imports == {"import django_celery_safe"}


class InPlainTestCase(TestCase):
    """Django's TestCase wraps each test in atomic(); that does not count."""

    def test_do_once_works(self) -> None:
        """do_once needs no TransactionTestCase."""
        person = baker.make(Person)
        with Person.do_once(person.pk, "is_welcome_email_sent") as row:
            assert row is not None
