"""Its tasks, and what sends them; with SHOP_WRONG each has the mistake that its test is for."""

import os
from typing import Any

from celery import shared_task
from django.db import transaction
from django.db.models import F

from django_celery_safe import SafeTask, cache_lock, single_instance, stages

from .models import Customer

WRONG = "SHOP_WRONG" in os.environ

#: Feeds that were imported.
imported: list[str] = []


def send_mail(pk: int) -> None:
    """Count an e-mail."""
    Customer.objects.filter(pk=pk).update(mails=F("mails") + 1)


@shared_task(base=SafeTask)
def welcome(pk: int) -> None:
    """Send an e-mail, once."""
    if WRONG:
        send_mail(pk)
        return
    with Customer.do_once(pk, "is_welcome_email_sent") as customer:
        if customer:
            customer.mails += 1
            customer.save(update_fields=["mails"])


@transaction.atomic
def sign_up() -> Customer:
    """Make a customer, and welcome them when that is committed."""
    customer = Customer.objects.create()
    if WRONG:
        welcome.delay(customer.pk)
    else:
        welcome.delay_on_commit(customer.pk)
    return customer


@transaction.atomic
def buy() -> Customer:
    """Make a customer, and keep the message in the outbox."""
    customer = Customer.objects.create()
    welcome.apply_async_on_commit((customer.pk + WRONG,), outbox=True)
    return customer


@shared_task(base=SafeTask)
@single_instance(key="{url}" if not WRONG else "{url} {full}")
def import_feed(url: str, full: bool = False) -> None:
    """Import a feed; a full import and another one at a time."""
    imported.append(url)


def report() -> bool:
    """Write the one report, if nobody else does."""
    with cache_lock("report") as lock:
        return bool(lock) or WRONG


@shared_task(base=SafeTask)
@stages.step
def fetch(params: dict[str, Any]) -> dict[str, Any]:
    """Be the first step."""
    return {"pictures": 3}


@shared_task(base=SafeTask)
@stages.step
def resize(params: dict[str, Any]) -> bool | dict[str, Any]:
    """Be the second step."""
    return not WRONG and {"thumbnails": params["pictures"]}
