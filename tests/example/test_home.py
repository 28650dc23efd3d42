"""The start page over HTTP, and the policy that every page comes with."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.example.site import EXAMPLE, POLICY, Visitor, environment, execute, migrate

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 200),
        ("/activity/", 200),
        ("/feeds/samples/harbour-notes.rss", 200),
        ("/admin/login/", 200),
        ("/admin/", 200),
        ("/feeds/import/", 405),
        ("/nowhere/", 404),
    ],
)
def test_every_answer_has_the_policy(visitor: Visitor, path: str, status: int) -> None:
    """Pages, the admin's, documents and refusals come with one strict policy."""
    answer = visitor.get(path)
    assert (answer.status, answer.policy) == (status, POLICY)


def test_refused_form_has_the_policy(visitor: Visitor) -> None:
    """The page that a missing token leads to has it too."""
    answer = visitor.send("/feeds/import/", {"url": "http://127.0.0.1/"})
    assert (answer.status, answer.policy) == (403, POLICY)


@pytest.mark.parametrize(
    "template", sorted(EXAMPLE.rglob("*.html")), ids=lambda path: str(path.relative_to(EXAMPLE))
)
def test_template_needs_no_weaker_policy(template: Path) -> None:
    """No style and no script stands in a page, nor in an attribute of one."""
    found = re.findall(
        r"<style|\sstyle=|\son\w+=|javascript:|<script(?![^>]*\ssrc=)", template.read_text()
    )
    assert found == []


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of a site of this test's own, with its tables and no process."""
    env = environment(tmp_path)
    migrate(env)
    return env


def see(env: dict[str, str], before: str = "") -> Any:
    """Execute code, look at the start page, and return it with the number of its queries."""
    return json.loads(
        execute(
            env,
            f"""
import json
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
{before}
Client().get("/activity/", headers={{"host": "localhost"}})
with CaptureQueriesContext(connections["default"]) as data:
    with CaptureQueriesContext(connections["locks"]) as locks:
        page = Client().get("/", headers={{"host": "localhost"}})
print(json.dumps([page.status_code, page.text, len(data) + len(locks)]))
""",
        )
    )


MANY = """
from django.utils import timezone
from django_celery_safe import cache_lock
from django_celery_safe.models import OutboxMessage, StageRun, StageStep
now = timezone.now()
OutboxMessage.objects.bulk_create(
    OutboxMessage(task=f"message {n}.", task_id=n, body=b"", properties="{}",
                  created_at=now, due_at=now)
    for n in range(300)
)
StageRun.objects.bulk_create(
    StageRun(pk=n, stages=1, created_at=now, stage_at=now) for n in range(1, 301)
)
StageStep.objects.bulk_create(
    StageStep(run_id=n, stage=1, position=m, priority=1, task="t", task_id=f"{n}-{m}",
              status="succeeded" if m else "waiting")
    for n in range(1, 301) for m in range(3)
)
locks = [cache_lock(f"lock {n}.") for n in range(120)]
assert all(lock.acquire() for lock in locks)
"""


def test_page_is_bounded(env: dict[str, str]) -> None:
    """Hundreds of locks, messages and runs make it neither longer nor ask more often."""
    status, page, few = see(env)
    assert status == 200
    status, page, many = see(env, MANY)
    assert status == 200
    # Two more, for all runs together: their steps, and their albums.
    assert many == few + 2
    assert len(re.findall(r"> lock \d+\.<", page)) == 4
    assert re.findall(r"message \d+\.", page) == [f"message {n}." for n in range(4)]
    assert page.count("2 of 3 steps, in stage 1 of 1") == 4
    assert page.count('class="count">100+<') == 3
    assert "4 of 100+ are shown." in page


@pytest.mark.parametrize(
    ("table", "panel"),
    [
        ("django_celery_safe_outboxmessage", "messages"),
        ("django_celery_safe_stagestep", "runs"),
        ("albums_album", "totals-unknown"),
    ],
)
def test_what_can_not_be_asked_is_not_known(env: dict[str, str], table: str, panel: str) -> None:
    """A table that does not answer makes its part of the page unknown, and not empty."""
    run = "StageRun.objects.create(stages=1, created_at=timezone.now(), stage_at=timezone.now())"
    drop = f'connections["default"].cursor().execute("DROP TABLE {table}")'
    imports = "from django.utils import timezone\nfrom django_celery_safe.models import StageRun"
    status, page, _ = see(env, f"{imports}\n{run}\n{drop}")
    assert status == 200
    (part,) = re.findall(rf'id="{panel}".*?(?:</article>|</p>)', page, re.DOTALL)
    assert "Not known" in part
    assert page.count('id="people"') == (panel != "totals-unknown")
