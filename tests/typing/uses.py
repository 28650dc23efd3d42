"""
Uses of the public names, as a project writes them.

``test_uses`` has mypy and pyright check this file: each ``# E: code`` is an error that they must
find in that line, by mypy's code, and there must be no other.
"""

from datetime import timedelta
from typing import Any, assert_type

from celery import shared_task
from celery.result import AsyncResult
from django.db import models

from django_celery_safe import (
    CacheLock,
    Claim,
    IdempotentMixin,
    SafeTask,
    SafeTaskMixin,
    cache_lock,
    idempotent,
    resumable,
    single_instance,
)


@single_instance
def bare(number: int) -> str:
    """Be decorated without options."""
    return str(number)


@single_instance(key="{number}", on_conflict="retry", unique_until="start")
def told(number: int) -> str:
    """Be decorated with options."""
    return str(number)


# The decorator keeps what a function takes; skipped, it returns None.
assert_type(bare(1), str | None)
assert_type(told(number=1), str | None)
bare("1")  # E: arg-type
told(1, 2)  # E: call-arg
told()  # E: call-arg

# What can be told is known.
single_instance(on_conflict="nope")  # E: call-overload
single_instance(unique_until="never")  # E: call-overload
single_instance(unique_until=timedelta(minutes=10))
single_instance(unique_until=[600])  # E: call-overload
single_instance(renew=False)  # E: call-overload
single_instance(timeout="10")  # E: call-overload


# celery-types 0.26 takes a task's types from its base alone, so they stand there.
@shared_task(base=SafeTask[[int], str | None])
@single_instance(unique_until="end")
def typed(number: int) -> str:
    """Be a task whose base says what it takes."""
    return str(number)


def send_typed() -> None:
    """Send it in each way."""
    assert_type(typed(1), str | None)
    typed("1")  # E: arg-type
    typed.delay("1")  # E: arg-type
    typed.delay_on_commit("1")  # E: arg-type
    typed.lock_name("1")  # E: arg-type
    for result in (
        typed.delay(1),
        typed.delay_on_commit(1),
        typed.apply_async((1,), single_instance={"on_conflict": "retry"}),
        typed.apply_async_on_commit((1,), using="default", outbox=True),
    ):
        assert_type(result.is_duplicate, bool | None)
        assert_type(result.send_error, Exception | None)
        assert_type(result.get(), str | None)
        print(result.is_dupliacte)  # E: attr-defined
    results: list[AsyncResult[str | None]] = [typed.delay(1)]
    results.append(typed.delay_on_commit(1))


# Without types its arguments are not checked, and what its sends return is known.
@shared_task(base=SafeTask, bind=True)
@single_instance(key=["number"])
def untyped(self: SafeTask, number: int) -> str:
    """Be a task of the bare class, which is also what its first argument can be called."""
    assert_type(self.request.retries, int)
    return str(number)


def send_untyped() -> None:
    """Send it in each way."""
    assert_type(untyped.delay("anything").is_duplicate, bool | None)
    assert_type(untyped.delay_on_commit(1).send_error, Exception | None)
    assert_type(untyped.apply_async((1,)).get(), Any)
    untyped.dealy(1)  # E: attr-defined


class AppTask(SafeTaskMixin):
    """The task class of a project."""

    abstract = True


class TypedAppTask(SafeTask[[int], str]):
    """A class with its types."""

    def run(self, number: int) -> str:
        """Do nothing."""
        return str(number)


TypedAppTask().delay("1")  # E: arg-type
assert_type(TypedAppTask().delay(1).get(), str)
assert_type(AppTask().delay("anything").is_duplicate, bool | None)


# A lock as a block, by hand and as a decorator, which keeps what a function takes and returns.
with cache_lock("feed:42", timeout=timedelta(minutes=1)) as lock:
    assert_type(lock, CacheLock)
    assert_type(bool(lock), bool)
    assert_type(lock.fence, int | None)
    lock.extend("60")  # E: arg-type
assert_type(cache_lock("feed:42", blocking_timeout=None).acquire(), bool)
cache_lock(42)  # E: arg-type
cache_lock("feed:42", limit="3")  # E: arg-type


@cache_lock("report")
def report(day: int, *, draft: bool = False) -> list[str]:
    """Be locked while it runs."""
    return [str(day)] * draft


assert_type(report(1, draft=True), list[str])
report("1")  # E: arg-type
report(1, draught=True)  # E: call-arg


class Order(IdempotentMixin, models.Model):
    """A row of a project."""

    is_paid: models.BooleanField[bool, bool] = models.BooleanField(default=False)

    def pay(self) -> int:
        """Do nothing."""
        return 1


# The row is of the model's own type, or None: it was done before.
with Order.do_once(1, "is_paid", guarantee="at_most_once") as order:
    assert_type(order, Order | None)
    order.pay()  # E: union-attr
    if order:
        assert_type(order.pay(), int)
Order.do_once(1, 2)  # E: arg-type
Order.do_once(1, "is_paid", guarantee="nope")  # E: arg-type


# Work that is done once, as a block and as a decorator, bare or with options.
with idempotent("invoice:42", ttl=None) as claim:
    assert_type(claim, Claim)
    claim.finish({"invoice": 42})


@idempotent
def digest(user: int) -> str:
    """Be done once for all arguments."""
    return str(user)


@idempotent(key="{user}:{day}", timeout=60)
def daily(user: int, day: int) -> dict[str, int]:
    """Be done once for a key."""
    return {"user": user, "day": day}


assert_type(digest(1), str)
assert_type(daily(1, day=2), dict[str, int])
daily(1)  # E: call-arg
idempotent(key="{user}", timeout="60")  # E: call-overload


@shared_task(base=SafeTask[[int, int], dict[str, int]])
@idempotent(key="{user}:{day}")
def carried(user: int, day: int) -> dict[str, int]:
    """Be a task that is done once."""
    return {"user": user, "day": day}


assert_type(carried.delay_on_commit(1, 2).get(), dict[str, int])
carried.delay(1)  # E: call-arg
carried.delay_on_commit(1, "2")  # E: arg-type

# A loop has the items of what it walks.
for number in resumable(range(3), every=2):
    assert_type(number, int)
resumable(3)  # E: arg-type
