"""An album in four stages: a process is killed in the second; another one fails and is resumed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from io import StringIO
from time import monotonic
from typing import Final

from django.conf import settings
from django.core.files.base import ContentFile
from django.core.management import call_command
from django.db import transaction
from django.test import Client
from django.urls import reverse
from PIL import Image
from rich.text import Text

from albums import imaging, samples
from albums.making import create_album
from albums.models import Album
from demo.errors import DemoError
from demo.promises import Promise, counted
from demo.storage import Gate
from demo.surroundings import Surroundings
from django_celery_safe import stages
from django_celery_safe.models import StageRun

PICTURES: Final = tuple(samples.SCENERIES)
#: One fetch and one thumbnail for each, the index, the contact sheet and the e-mail.
STEPS: Final = 2 * len(PICTURES) + 3
#: Pictures of the album with a broken picture, the broken one included.
FEW: Final = 3
FEW_STEPS: Final = 2 * FEW + 3
#: Number of the thumbnail that is held.
HELD: Final = 3
#: Longest wait for one step of this scene, s.
STEP_WITHIN: Final = 30.0
#: How much later than the lease's end a step may begin again, s: the worker has to notice
#: the loss, and to start another child.
GRACE: Final = 5.0


def play(around: Surroundings) -> Iterator[Promise]:
    """
    Kill the process that makes one of eight thumbnails, while the other seven are made.

    The storage lets that one wait, so the process is in the middle of its step. Nobody
    touches the run after that. Then another album fails at a picture that was cut off;
    the picture is taken out, and the album resumed, as on its page.
    """
    around.display.scene("An album in four stages, and a process killed in the second")
    gate = Gate()
    files = [ContentFile(samples.paint(name), name) for name in PICTURES]
    with transaction.atomic():
        album = create_album("From dark to light", "ivy@example.com", files)
        # In time: the run begins when this commits.
        gate.hold(f"albums/{album.pk}/{album.pictures.all()[HELD].pk}-small.jpg")
    _wait(around, "a thumbnail is being written", lambda: len(gate.find_waiting()) == 1)
    _wait(around, "the rest of its stage is done", lambda: _run(album).progress.done == STEPS - 3)
    around.display.note(Text(f"$ manage.py celery_stages show {album.run_id}", "dim"))
    around.display.note(Text(_celery_stages("show", str(album.run_id)), "dim"))

    named = _named_process(album)
    child = around.worker.child(gate.find_waiting()[0])
    child.kill()
    killed_at = monotonic()
    around.display.note(f"  SIGKILL to process {child.pid}")
    begun = _run(album).stage
    _wait(around, "it is being written again", lambda: len(gate.find_waiting()) == 2)
    pause = monotonic() - killed_at
    gate.release()
    _wait_for_the_end(around, album, STEPS)
    yield Promise(
        "celery_stages names the process that runs a step",
        expected="the killed one",
        seen="the killed one" if named == child.pid else f"process {named}",
        kept=named == child.pid,
    )
    yield from _compare_killed(around, album, begun, pause)
    yield from _fail_and_resume(around)


def _wait(around: Surroundings, what: str, condition: Callable[[], bool]) -> None:
    around.display.progress(what, 0, 1)
    around.worker.wait_until(condition, what, seconds=STEP_WITHIN)
    around.display.progress(what, 1, 1)


def _wait_for_the_end(around: Surroundings, album: Album, steps: int) -> None:
    def is_over() -> bool:
        run = _run(album)
        around.display.progress(f"steps of album {album.pk}", run.progress.done, steps)
        return run.status in stages.Status.STOPPED and not run.steps.running().exists()

    around.worker.wait_until(is_over, f"album {album.pk} had ended", seconds=STEP_WITHIN)


def _run(album: Album) -> StageRun:
    run = album.find_run()
    if run is None:
        raise DemoError(f"Album {album.pk} has no run.")
    return run


def _celery_stages(*arguments: str) -> str:
    """Return what ``manage.py celery_stages`` prints."""
    printed = StringIO()
    call_command("celery_stages", *arguments, stdout=printed)
    return printed.getvalue()


def _named_process(album: Album) -> int | None:
    """Return the process that runs the album's only running step, as the command shows it."""
    shown = json.loads(_celery_stages("show", str(album.run_id), "--json"))
    pids = [step["pid"] for step in shown["steps"] if step["status"] == stages.Status.RUNNING]
    return pids[0] if len(pids) == 1 else None


def _compare_killed(
    around: Surroundings, album: Album, begun: int, pause: float
) -> Iterator[Promise]:
    album.refresh_from_db()
    run = _run(album)
    lease = settings.DJANGO_CELERY_SAFE["LOCK_TIMEOUT"]
    steps = list(run.steps)
    made = {
        name: n for name, n in Gate().written().items() if name.startswith(f"albums/{album.pk}/")
    }
    yield counted("Stage of the album whose process was killed, out of 4", 2, begun)
    yield Promise(
        f"Its step begins again by itself after the dead lease ({lease:g} s)",
        expected=f"at most {lease + GRACE:g} s later",
        seen=f"{pause:.1f} s later",
        kept=0 < pause <= lease + GRACE,
    )
    yield counted(
        "Steps that succeeded", STEPS, sum(s.status == stages.Status.SUCCEEDED for s in steps)
    )
    yield Promise(
        "Times that its steps were begun: the killed one's, the others'",
        expected="2, 1",
        seen=", ".join(str(n) for n in sorted({s.starts for s in steps}, reverse=True)),
        kept=sorted(s.starts for s in steps) == [1] * (STEPS - 1) + [2],
    )
    yield Promise(
        f"Times that each of its {2 * len(PICTURES) + 1} files was written",
        expected="1",
        seen=", ".join(str(n) for n in sorted(set(made.values()))) or "none",
        kept=len(made) == 2 * len(PICTURES) + 1 and set(made.values()) == {1},
    )
    yield counted("Rows of four pictures on its contact sheet", 2, _rows(album))
    yield counted("E-mails that it is ready", 1, around.mail.accepted[album.email])


def _rows(album: Album) -> int:
    """Return how many rows of four pictures a contact sheet has, by its size."""
    with album.sheet.open() as file, Image.open(file) as sheet:
        sheet.load()
        rows, rest = divmod(sheet.height - imaging.HEAD, imaging.TILE[1] + imaging.GAP)
    return rows if not rest else 0


def _fail_and_resume(around: Surroundings) -> Iterator[Promise]:
    names = PICTURES[: FEW - 1]
    files = [ContentFile(samples.paint(name), name) for name in names]
    files.append(ContentFile(samples.cut_off(PICTURES[-1]), "cut-off.jpg"))
    album = create_album("With a broken one", "joe@example.com", files)
    _wait_for_the_end(around, album, FEW_STEPS)
    visitor = Client()
    page = visitor.get(reverse("albums:detail", args=[album.pk])).text
    mails_before = around.mail.accepted[album.email]

    broken = album.pictures.get(name="cut-off.jpg")
    visitor.post(reverse("albums:remove", args=[album.pk, broken.pk]))
    visitor.post(reverse("albums:resume", args=[album.pk]))
    _wait_for_the_end(around, album, FEW_STEPS)
    run = _run(album)
    yield Promise(
        "The page of an album with a broken picture names its error",
        expected="cut-off.jpg: not a whole picture",
        seen="cut-off.jpg: not a whole picture" if "cut-off.jpg: not a whole" in page else "none",
        kept="cut-off.jpg: not a whole picture" in page,
    )
    yield counted("E-mails while it has failed", 0, mails_before)
    yield counted("Resumed: steps that succeeded", FEW_STEPS, run.progress.done)
    yield counted("Resumed: e-mails", 1, around.mail.accepted[album.email])
    starts = Counter(run.steps.values_list("starts", flat=True))
    yield counted("Resumed: steps that were begun twice, the broken one's", 1, starts[2])
