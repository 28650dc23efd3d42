"""Orders whose processes are killed, and whose messages the broker forgets."""

from collections.abc import Iterator

from demo.backstage import Promise, Show, count, soon
from django_celery_safe.models import OutboxMessage
from orders.models import Order, Product
from orders.tasks import import_orders, place_order

#: Customers whose web process is killed right after the commit.
UNSENT = ("ann", "ben", "cem")
#: Signs up there, without the outbox.
LOST = "eve@example.com"
#: Orders whose message the broker forgets.
FORGOTTEN = 5
#: The order whose process is killed while it is shipped.
KILLED = "lou@example.com"
#: Orders of another shop, and how often the process that imports them is killed.
IMPORTED, KILLS = 200, 3
ORDERS = len(UNSENT) + FORGOTTEN + 1


def play(show: Show) -> Iterator[Promise]:
    """Lose messages in three ways, and then start a relay."""
    show.begin(
        '3. Kept until it is done: orders/, outbox="until_done"',
        "Between the commit and the end of the work, a message can get lost in three "
        "places: with its sender, in the broker, and with its worker.",
    )
    orders = [("order", name) for name in UNSENT]
    orders.append(("sign-up", "eve"))
    show.kill_senders(*orders, when="committed", which="senders, right after their commit")
    show.say("their three orders and one sign-up are saved, and were never sent")
    kept = OutboxMessage.objects.count()
    with show.worker_stopped():
        for number in range(FORGOTTEN):
            place_order(f"customer{number}@example.com")
        for message in show.broker.iterdir():
            message.unlink()
    show.say(f"the broker forgets the messages of {FORGOTTEN} orders")
    show.mail.held.add(KILLED)
    place_order(KILLED)
    show.wait("a process of the worker ships another order", lambda: show.mail.waiting[KILLED])
    show.kill_named("celery_outbox", "list", "--state", "running")
    show.wait("its connection to the mail server is cut", lambda: not show.mail.waiting[KILLED])
    with show.relay():
        show.wait(
            "a relay is started; the killed order is shipped again",
            lambda: show.mail.waiting[KILLED],
        )
        pause = show.since_kill()
        show.mail.held.clear()
        show.wait("the outbox is empty", lambda: not OutboxMessage.objects.exists())
        import_orders.delay_on_commit(IMPORTED)
        for _ in range(KILLS):
            before = imported()
            show.wait("an import goes on", lambda: imported() > before)  # noqa: B023
            show.kill_named("celery_outbox", "list", "--state", "running")
        show.wait("the import is done", lambda: not OutboxMessage.objects.exists())
    yield count("Messages of killed senders that the outbox keeps", len(UNSENT), kept)
    yield count("Their orders that are shipped", len(UNSENT), shipped(*UNSENT))
    yield count("E-mails of their sign-up, which has no outbox", 0, show.mail.accepted[LOST])
    yield count("Orders shipped whose message the broker forgot", FORGOTTEN, shipped("customer"))
    yield soon("The order of the killed worker is shipped again", pause)
    yield count(f"Lamps taken from the stock for {ORDERS} orders", ORDERS, 100 - stock())
    yield count(f"Orders that an import saves, killed {KILLS} times", IMPORTED, imported())
    yield count("Messages left in the outbox", 0, OutboxMessage.objects.count())


def imported() -> int:
    """Return how many orders of another shop were saved."""
    return Order.objects.filter(email__startswith="import").count()


def shipped(*names: str) -> int:
    """Return how many orders of customers whose names begin so were shipped."""
    orders = Order.objects.filter(shipped_at__isnull=False)
    return sum(orders.filter(email__startswith=name).count() for name in names)


def stock() -> int:
    """Return how many lamps are left."""
    return Product.objects.get().stock
