"""The task of the runs, and workers with one deliberate fault each."""

import time
from threading import Thread
from typing import Any, Final

from celery import shared_task
from django.db import connection, transaction

from django_celery_safe import SafeTask, current_claim, resumable
from django_celery_safe.resuming import loop
from django_celery_safe.resuming.checkpoints import Cursor
from tests.app.models import Person
from tests.faults.scenario import enter, find_fault, find_witness

#: Rows of a chunk.
EVERY: Final = 50
#: Every tenth row is one that is only deleted, when the place is behind it.
PERIOD, DELETED = 10, 5


@shared_task(base=SafeTask)
def write(first: int, last: int, pause: float) -> None:
    """Write to each row of a part once."""
    people, witness = Person.everyone.filter(pk__gte=first, pk__lt=last), find_witness()
    with witness.room.inside(str(first)):
        witness.journal.write("begun", part=first)
        try:
            for row in resumable(people, every=EVERY):
                if row.pk % PERIOD == 0:
                    people.filter(pk=row.pk - PERIOD + DELETED).delete()
                time.sleep(pause)
                if row.pk % PERIOD != DELETED:
                    row.email += "x"
                    row.save(update_fields=["email"])
        finally:
            witness.journal.write("left", part=first)


def send(rows: int, tasks: int, pause: float) -> None:
    """Write the rows, and send a task for each part of them."""
    enter()
    Person.everyone.bulk_create((Person(pk=pk, email="") for pk in range(1, rows + 1)), 5000)
    with transaction.atomic():
        for number in range(tasks):
            first, last = (1 + rows * place // tasks for place in (number, number + 1))
            write.delay_on_commit(first, last, pause)


read: Final = loop.Rows.read


def move_row(claim: Any, text: str) -> None:
    """Write a cursor into the row of a claim."""
    assert claim.table.move(claim.name, claim.token, cursor=text, lease=claim.seconds, moved=True)


def read_after_cursor(rows: Any, at: Any, alias: str, most: int) -> loop.Part:
    """Commit the cursor behind a chunk before its writes."""
    part, claim = read(rows, at, alias, most), current_claim()

    def move() -> None:
        text = Cursor(rows.of, part[1], 0, 0).encode()
        move_row(claim, text)
        connection.close()

    mover = Thread(target=move)
    mover.start()
    mover.join()
    return part


def commit_before_cursor(chunk: Any, cursor: Cursor) -> None:
    """Commit the cursor behind a chunk in a transaction of its own."""
    while chunk._blocks:
        chunk._blocks.pop().__exit__(None, None, None)
    chunk._claim.abandon_chunk = None
    time.sleep(0.02)
    claim = current_claim()
    move_row(claim, cursor.encode())


def read_by_offset(rows: Any, at: Any, alias: str, most: int) -> loop.Part:
    """Count rows instead of going by their key."""
    begin = at or 0
    found = list(rows._rows.using(alias).order_by("pk")[begin : begin + most])
    return found, begin + len(found), len(found) < most


#: The wrong code that each fault puts in place of ours.
FAULTS: Final[dict[str, tuple[Any, str, Any]]] = {
    "cursor-first": (loop.Rows, "read", read_after_cursor),
    "cursor-last": (loop.Chunk, "commit", commit_before_cursor),
    "offset": (loop.Rows, "read", read_by_offset),
}
if fault := find_fault():
    setattr(*FAULTS[fault])
