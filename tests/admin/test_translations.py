"""The admin in Chinese: complete, with what the code marks today; commands stay English."""

import os
import re
import shutil
from gettext import GNUTranslations
from io import StringIO
from pathlib import Path
from string import Formatter
from typing import Any, Final

import pytest
from babel.messages import Message
from babel.messages.pofile import read_po
from django.core.management import call_command
from django.utils.translation import get_language, override
from pytest_django import Settings

import django_celery_safe
from django_celery_safe.inspection.locks import LockRow
from django_celery_safe.inspection.messages import STATES, MessageRow
from django_celery_safe.inspection.records import RecordRow
from django_celery_safe.inspection.runs import RunRow, StepRow
from django_celery_safe.inspection.words import translate_heading, translate_state
from django_celery_safe.models import IdempotencyRecord
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.pages import Visitor
from tests.admin.test_table_pages import OUTBOX
from tests.conftest import NOT_RUN

PACKAGE: Final = Path(django_celery_safe.__file__).parent
LANGUAGE: Final = "zh-hans"
CATALOG: Final = Path("locale/zh_Hans/LC_MESSAGES/django.po")
HAN: Final = re.compile("[\u4e00-\u9fff]")
HOW_TO: Final = "CONTRIBUTING.md says how to translate: 'Translate the admin'."

#: The same word in both languages.
SAME: Final = {"fence", "params", "Fence"}


def read(path: Path) -> list[Message]:
    """Return the messages of a catalog, its head apart."""
    with path.open("rb") as file:
        return [message for message in read_po(file) if message.id]


def fields(text: Any) -> list[str]:
    """Return the placeholders of both kinds in a text."""
    named = [f"%({name})" for name in re.findall(r"%\((\w+)\)s", text)]
    return sorted(named + [name for _, name, _, _ in Formatter().parse(text) if name is not None])


def test_every_text_is_translated() -> None:
    """Each text has a translation with the same placeholders, and the compiled file has it."""
    with (PACKAGE / CATALOG).with_suffix(".mo").open("rb") as file:
        compiled = GNUTranslations(file)
    for message in read(PACKAGE / CATALOG):
        assert message.string, f"{message.id!r} has no translation. {HOW_TO}"
        assert not message.fuzzy, f"{message.id!r} has a guessed translation. {HOW_TO}"
        assert fields(message.string) == fields(message.id), message
        key = f"{message.context}\x04{message.id}" if message.context else str(message.id)
        assert compiled.gettext(key) == message.string, f"Run compilemessages. {HOW_TO}"


def test_the_catalog_has_what_the_code_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``makemessages`` finds nothing new, and nothing that is gone."""
    if shutil.which("xgettext") is None:
        assert os.environ.get("CI", "").lower() not in {"1", "true"}, "CI needs gettext."
        pytest.skip(f"{NOT_RUN}gettext (no xgettext on the PATH)")
    copy = tmp_path / "package"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "static"))
    monkeypatch.chdir(copy)
    call_command("makemessages", locale=["zh_Hans"], no_obsolete=True, verbosity=0)
    marked = {(message.context, message.id) for message in read(copy / CATALOG)}
    kept = {(message.context, message.id) for message in read(PACKAGE / CATALOG)}
    assert marked == kept, HOW_TO


def test_headings_and_states() -> None:
    """Every heading of a row, and every state, has a translation."""
    missing = set()
    with override(LANGUAGE):
        for kind in (LockRow, MessageRow, RecordRow, RunRow, StepRow):
            with override("en"):
                english = {kind.heading(name) for name in {*kind.details, *kind.headings}}
            missing |= {text for text in english if translate_heading(text) == text}
        states = {*STATES, *Status.values, *IdempotencyRecord.State.values}
        missing |= {state for state in states if translate_state(state) == state}
    assert missing <= SAME, f"Add them to inspection/words.py. {HOW_TO}"


def test_pages_are_in_chinese(root: Visitor, settings: Settings) -> None:
    """A list, a question and the answer read as a Chinese administrator expects them."""
    settings.LANGUAGE_CODE = LANGUAGE
    row = rows.leave_dead("E1")
    page = root.get(OUTBOX)
    assert page.columns[1:4] == ["任务", "任务 ID", "状态"]
    assert page.rows[0]["状态"] == "死信"
    assert "丢弃：确定吗？" in root.take(OUTBOX, "discard", row.pk).text
    assert root.confirm(OUTBOX, "discard", row.pk).messages == ["1 个发件箱消息已丢弃。"]


def test_commands_stay_english(root: Visitor) -> None:
    """Commands print the same in every project, for scripts and searches."""
    rows.hold("shop:1")
    printed = StringIO()
    with override(LANGUAGE):
        call_command("celery_locks", "show", "shop:1", stdout=printed)
        assert get_language() == LANGUAGE
    assert "liveness" in printed.getvalue()
    assert HAN.findall(printed.getvalue()) == []
