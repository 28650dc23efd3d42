"""The code that the documentation shows compiles, and what it marks as runnable runs."""

import doctest
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
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


def is_runnable(block: Block) -> bool:
    """Tell whether a page marks a block as one that runs as it stands."""
    return block.marker == "runnable"


with_runnable = [page for page in pages() if any(map(is_runnable, blocks(page)))]


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
    for block in filter(is_runnable, blocks(page)):
        exec(compile_block(page, block), world)


def test_markers_are_known() -> None:
    """No marker above a block is misspelt, so none is passed over in silence."""
    known = {"", "runnable", "command: demo", "command: tests", "run", "prints", "diff"}
    walked = ("file: ", "append: ", "background: ")
    markers = {b.marker for page in pages() for b in page.blocks() if not is_step(b)}
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


def is_step(block: Block) -> bool:
    """Return whether a block is a change of a file, which test_adoption.py makes."""
    return block.marker[:1].isdecimal()


def compile_block(page: Page, block: Block) -> Any:
    """Compile a block so that a traceback shows its place in the page."""
    return compile("\n" * (block.line - 1) + block.code, page.path, "exec", dont_inherit=True)


@pytest.fixture
def eager() -> Iterator[Celery]:
    """Run tasks in this process, where they are sent."""
    app.conf.update(task_always_eager=True, task_eager_propagates=True)
    yield app
    app.conf.update(task_always_eager=False, task_eager_propagates=False)


@pytest.fixture
def no_receivers_left() -> Iterator[None]:
    """Disconnect what the examples of a page connect to our signals."""
    ours = [value for value in vars(signals).values() if isinstance(value, Signal)]
    receivers = [(signal, list(signal.receivers)) for signal in ours]
    yield
    for signal, before in receivers:
        signal.receivers = before
        signal.sender_receivers_cache.clear()


@pytest.fixture
def world(
    transactional_db: None, locks_in_memory: None, eager: Celery, no_receivers_left: None
) -> dict[str, Any]:
    """The names that the examples presuppose: a model with flags, a row of it, a task."""
    return {
        "User": User,
        "user": User.objects.create(),
        "send_welcome_email": send_welcome_email,
        "transaction": transaction,
    }
