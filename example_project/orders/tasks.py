"""Shipping an order: carried by the outbox until it is done."""

import time

from celery import shared_task
from django.core.mail import send_mail
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from django_celery_safe import current_claim, resumable

from .models import Order, Product

SHIPPED = """\
Your {product} is on its way. If a process is killed right after this e-mail, it comes twice.
But the lamp is taken from the stock only once.
"""


@shared_task(outbox="until_done")
def ship(order_id: int) -> None:
    """
    Write to the customer, and take the product from the stock.

    The e-mail is sent first: better twice than never. What stands in the database changes
    exactly once, because the end of the task commits together with it.
    """
    order = Order.objects.select_related("product").get(pk=order_id)
    text = SHIPPED.format(product=order.product)
    send_mail(f"Your order {order_id}", text, None, [order.email])
    with transaction.atomic():
        Product.objects.filter(pk=order.product_id).update(stock=F("stock") - 1)
        Order.objects.filter(pk=order_id).update(shipped_at=timezone.now())
        current_claim().finish()


@shared_task(outbox="until_done")
def import_orders(count: int) -> None:
    """
    Take over the orders of another shop.

    If its process is killed, the task goes on behind the last twenty orders that were saved.
    """
    product = Product.objects.get()
    for number in resumable(range(count), every=20):
        Order.objects.create(product=product, email=f"import{number}@example.com")
        time.sleep(0.01)  # the other shop is slow


@transaction.atomic
def place_order(email: str) -> Order:
    """
    Save an order, and have it shipped.

    The message is a row of the outbox, which commits together with the order. So it can't get
    lost, whichever process is killed and whatever the broker forgets.
    """
    product, _ = Product.objects.get_or_create(name="Lamp", defaults={"stock": 100})
    order = Order.objects.create(product=product, email=email)
    ship.delay_on_commit(order.pk)
    return order
