"""The code that the documentation shows compiles, and what it marks as runnable runs."""

import doctest
import importlib
from typing import Any

import pytest
from django.core.mail import send_mail
from django.db import models, transaction
from django.dispatch import Signal

import django_celery_safe
from django_celery_safe import signals
from tests.app.celery import app
from tests.app.models import Person
from tests.docs.pages import Block, Page, pages
from tests.modules import find_modules


class User(Person):
    """The reader's user, as the examples know it."""

    objects = models.Manager["User"]()

    class Meta:
        proxy = True
        app_label = "app"

    def email_user(self, subject: str, message: str) -> None:
        """Send this user an e-mail, as Django's own does."""
        send_mail(subject, message, None, [self.email])


@app.task(base=django_celery_safe.SafeTask, name="docs.send_welcome_email", shared=False)
def send_welcome_email(user_id: int) -> None:
    """Send the e-mail of the examples."""
    User.objects.get(pk=user_id).email_user("Welcome", "…")


@app.task(base=django_celery_safe.SafeTask, name="shop.tasks.fetch", shared=False)
@django_celery_safe.stages.step
def fetch(params: dict[str, Any]) -> dict[str, Any]:
    """Be the first step of the examples."""
    return {"pictures": [11, 12, 13]}


@app.task(base=django_celery_safe.SafeTask, name="shop.tasks.notify", shared=False)
@django_celery_safe.stages.step
def notify(params: dict[str, Any]) -> None:
    """Be the last step of the examples."""


def blocks(page: Page) -> list[Block]:
    """Return the Python of a page."""
    return [block for block in page.blocks() if block.language == "python"]


def runnable(page: Page) -> list[Block]:
    """Return the blocks that a page marks as ones that run as they stand."""
    return [block for block in blocks(page) if block.marker == "runnable"]


with_runnable = [page for page in pages() if runnable(page)]


def test_python_compiles() -> None:
    """Every Python example is Python."""
    faults = []
    for page in pages():
        for block in blocks(page):
            try:
                compile_block(page, block)
            except SyntaxError as error:
                faults.append(f"{page.name}, line {error.lineno}: {error.msg}")
    assert faults == []


@pytest.mark.parametrize("page", with_runnable, ids=lambda page: page.name)
def test_runnable_runs(page: Page, world: dict[str, Any]) -> None:
    """The runnable examples of a page run, one after the other, in a project like the reader's."""
    # A name of its own for the tasks of each page: Celery makes one of each name only.
    world["__name__"] = "docs." + page.name.replace("/", "_").removesuffix(".md")
    for block in runnable(page):
        exec(compile_block(page, block), world)


def test_markers_are_known() -> None:
    """No marker above a block is misspelt, so none is passed over in silence."""
    known = {"", "runnable", "command: demo", "command: tests", "run", "prints", "diff"}
    walked = ("file: ", "append: ", "background: ")
    # Those of steps, which test_adoption.py makes, begin with a number.
    markers = {b.marker for page in pages() for b in page.blocks() if not b.marker[:1].isdecimal()}
    assert {marker for marker in markers if not marker.startswith(walked)} <= known


def test_docstrings(db: None, locks_in_memory: None) -> None:
    """The examples in docstrings do what they show: the decorators and the lock have one each."""
    shown, failed = set(), []
    for name in ("django_celery_safe", *find_modules()):
        module = importlib.import_module(name)
        finder = doctest.DocTestFinder(exclude_empty=True)
        shown |= {each.name.rpartition(".")[2] for each in finder.find(module) if each.examples}
        if doctest.testmod(module, verbose=False).failed:
            failed.append(name)
    assert failed == []
    assert shown >= {"cache_lock", "describe", "idempotent", "single_instance", "start", "step"}


def compile_block(page: Page, block: Block) -> Any:
    """Compile a block so that a traceback shows its place in the page."""
    return compile("\n" * (block.line - 1) + block.code, page.path, "exec", dont_inherit=True)


@pytest.fixture
def world(
    transactional_db: None, locks_in_memory: None, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """
    The names that the examples presuppose: a model with flags, a row of it, a task.

    Tasks run where they are sent, and what a page connects to our signals ends with it.
    """
    for option in ("task_always_eager", "task_eager_propagates"):
        monkeypatch.setitem(app.conf, option, True)
    for signal in vars(signals).values():
        if isinstance(signal, Signal):
            monkeypatch.setattr(signal, "receivers", [*signal.receivers])
    return {
        "User": User,
        "user": User.objects.create(),
        "send_welcome_email": send_welcome_email,
        "transaction": transaction,
    }
