"""The admin in Chinese: complete, with what the code marks today; commands stay English."""

import ast
import os
import re
import shutil
from collections.abc import Iterator
from gettext import GNUTranslations
from io import StringIO
from pathlib import Path
from string import Formatter
from typing import Final, NamedTuple

import pytest
from django.core.management import call_command
from django.utils.translation import get_language, override
from pytest_django import Settings

import django_celery_safe
from django_celery_safe.inspection.locks import LockRow
from django_celery_safe.inspection.messages import STATES, MessageRow
from django_celery_safe.inspection.records import RecordRow
from django_celery_safe.inspection.row import Row
from django_celery_safe.inspection.runs import RunRow, StepRow
from django_celery_safe.inspection.words import translate_heading, translate_state
from django_celery_safe.models import IdempotencyRecord, OutboxMessage, StageRun, StageStep
from django_celery_safe.stages import Status
from tests.admin import rows
from tests.admin.conftest import every_page
from tests.admin.pages import Page, Visitor
from tests.admin.test_lock_pages import LIST as LOCKS
from tests.admin.test_table_pages import OUTBOX, RECORDS, RUNS, STEPS
from tests.conftest import NOT_RUN

PACKAGE: Final = Path(django_celery_safe.__file__).parent
LANGUAGE: Final = "zh-hans"
CATALOG: Final = Path("locale/zh_Hans/LC_MESSAGES/django.po")
HAN: Final = re.compile("[\u4e00-\u9fff]")
HOW_TO: Final = "CONTRIBUTING.md says how to translate: 'Translate the admin'."

#: The same word in both languages.
SAME: Final = {"fence", "params", "Fence"}


class Message(NamedTuple):
    """A text of the catalog and its translation."""

    context: str
    text: str
    translation: str
    fuzzy: bool


def read(path: Path) -> Iterator[Message]:
    """Yield the messages of a catalog, its head apart."""
    for entry in path.read_text("utf-8").split("\n\n"):
        if "#~" in entry:
            continue
        parts, current = {"msgctxt": "", "msgid": "", "msgstr": ""}, ""
        for line in entry.splitlines():
            if found := re.fullmatch(r'(?:(\w+) )?(".*")', line):
                current = found[1] or current
                parts[current] += ast.literal_eval(found[2])
        if parts["msgid"]:
            yield Message(*parts.values(), fuzzy="#, fuzzy" in entry)


def fields(text: str) -> list[str]:
    """Return the placeholders of both kinds in a text."""
    named = [f"%({name})" for name in re.findall(r"%\((\w+)\)s", text)]
    return sorted(named + [name for _, name, _, _ in Formatter().parse(text) if name is not None])


def test_every_text_is_translated() -> None:
    """Each text of the catalog has a translation with the same placeholders."""
    for message in read(PACKAGE / CATALOG):
        assert message.translation, f"{message.text!r} has no translation. {HOW_TO}"
        assert not message.fuzzy, f"{message.text!r} has a guessed translation. {HOW_TO}"
        assert fields(message.translation) == fields(message.text), message
        assert HAN.search(message.translation) or not re.search(
            "[A-Za-z]{3}", "".join(part for part, *_ in Formatter().parse(message.text))
        ) or message.text in SAME, message  # fmt: skip


def test_the_compiled_catalog_is_that_of_the_text() -> None:
    """The file that Django reads was compiled after the last change."""
    with (PACKAGE / CATALOG).with_suffix(".mo").open("rb") as file:
        compiled = GNUTranslations(file)
    for message in read(PACKAGE / CATALOG):
        found = (
            compiled.pgettext(message.context, message.text)
            if message.context
            else compiled.gettext(message.text)
        )
        assert found == message.translation, f"compilemessages was not run. {HOW_TO}"


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
    marked = {(message.context, message.text) for message in read(copy / CATALOG)}
    kept = {(message.context, message.text) for message in read(PACKAGE / CATALOG)}
    assert marked == kept, HOW_TO


@pytest.mark.parametrize("kind", [LockRow, MessageRow, RecordRow, RunRow, StepRow])
def test_headings_and_states(kind: type[Row]) -> None:
    """Every heading of a row, and every state, has a translation."""
    names = {*kind.details, *kind.headings}
    english = {kind.heading(name) for name in names}
    states = {*STATES, *Status.values, *IdempotencyRecord.State.values}
    with override(LANGUAGE):
        headings = {text for text in english if translate_heading(text) == text}
        missing = headings | {state for state in states if translate_state(state) == state}
    assert missing <= SAME, f"Add them to inspection/words.py. {HOW_TO}"


def pages_in_chinese(root: Visitor) -> Iterator[tuple[str, Page]]:
    """Yield a page of each kind, with rows in several states."""
    for url in (LOCKS, OUTBOX, RECORDS, RUNS, STEPS):
        yield f"empty {url}", root.get(url)
    rows.hold("shop:1")
    rows.hold("shop:2", rows.HOLDER._replace(renewed=False))
    message, sent = rows.leave_dead("E1"), rows.leave_sent()
    record = rows.record("shop:7", "running", rows.LEASE)
    run = rows.end(rows.begin(2, 1), Status.FAILED)
    step = rows.work_on(rows.begin(1))
    pages = {OutboxMessage: message, IdempotencyRecord: record, StageRun: run, StageStep: step}
    yield "lock", root.get(f"{LOCKS}shop_3A1/change/")
    for url in (LOCKS, OUTBOX, RECORDS, RUNS, STEPS):
        yield url, root.get(url)
    for model, row in pages.items():
        yield model.__name__, root.get(every_page(model, row.pk)["change"])
    selection = root.get(LOCKS).selections[0]
    for url, decision, chosen in [
        (LOCKS, "release", selection), (OUTBOX, "retry", message.pk), (OUTBOX, "retry", sent.pk),
        (OUTBOX, "discard", message.pk), (RECORDS, "forget", record.pk),
        (RUNS, "resume", run.pk), (RUNS, "abort", run.pk),
    ]:  # fmt: skip
        yield f"asks {decision}", root.take(url, decision, chosen)
        yield f"told {decision}", root.confirm(url, decision, chosen)
    yield "history", root.get(every_page(StageRun, run.pk)["history"])


#: The English words of a Chinese page: names of the code, data, and what Django 6.1 itself
#: has not translated.
ENGLISH: Final = re.compile(
    r"\b(web1|pid|shop[:.\w]*|id-1|[Ff]ence|[Pp]arams|UTC|ID|E1|Celery|CACHES|default|LocMemCache"
    r"|tests[.\w]*|ValueError|it does not work|the-secret-of-the-argument|name"
    r"|[0-9a-f]{8}-[-0-9a-f]*|run \d+|user-\d+|manage\.py celery_outbox relay|relay_outbox|beat"
    r"|idempotent|OUTBOX_RETENTION|STAGES_RETENTION|stages.start|Select an option)\b"
)


def test_pages_in_chinese(root: Visitor, settings: Settings) -> None:
    """No page of the admin has English left in Chinese, names and data apart."""
    settings.LANGUAGE_CODE = LANGUAGE
    left = {}
    for name, page in pages_in_chinese(root):
        assert page.status == 200, name
        assert HAN.search(page.content), name
        text = ENGLISH.sub("", " ".join([page.content, *page.messages]))
        left[name] = re.findall(r"[A-Za-z]{2,}[A-Za-z ,.]*", text)
    assert {name: english for name, english in left.items() if english} == {}, HOW_TO


def test_words_of_a_page_in_chinese(root: Visitor, settings: Settings) -> None:
    """A list, a question and the answer read as a Chinese administrator expects them."""
    settings.LANGUAGE_CODE = LANGUAGE
    rows.leave_dead("E1")
    page = root.get(OUTBOX)
    assert page.columns[1:4] == ["任务", "任务 ID", "状态"]
    assert page.rows[0]["状态"] == "死信"
    asked = root.take(OUTBOX, "discard", page.selections[0])
    assert "丢弃：确定吗？" in asked.text
    told = root.confirm(OUTBOX, "discard", page.selections[0])
    assert told.messages == ["1 个发件箱消息已丢弃。"]
    run = rows.begin(1)
    assert f"run {run.pk}" not in root.get(every_page(StageRun, run.pk)["change"]).text


def test_commands_stay_english(lite: str, settings: Settings) -> None:
    """Commands print the same in every project, for scripts and searches."""
    settings.LANGUAGE_CODE = LANGUAGE
    rows.hold("shop:1")
    message = rows.leave_dead()
    rows.record("shop:7", "running", rows.LEASE)
    run = rows.end(rows.begin(2, 1), Status.FAILED)
    here = ("--database", lite)
    for command in [
        ("celery_locks",), ("celery_locks", "show", "shop:1"), ("celery_outbox", "list", *here),
        ("celery_outbox", "show", str(message.pk), *here), ("celery_idempotency", "list", *here),
        ("celery_stages", "list", *here), ("celery_stages", "show", str(run.pk), *here),
    ]:  # fmt: skip
        printed = StringIO()
        with override(LANGUAGE):
            call_command(*command, stdout=printed)
            assert get_language() == LANGUAGE
        assert printed.getvalue().strip(), command
        assert HAN.findall(printed.getvalue()) == [], command
