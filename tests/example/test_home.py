"""The start page over HTTP, and the policy that every page comes with."""

import re
from pathlib import Path

import pytest

from tests.example.site import POLICY, Visitor, environment, execute, migrate

pytestmark = pytest.mark.nightly


def test_every_answer_has_the_policy(visitor: Visitor) -> None:
    """Pages, the admin's, documents and refusals come with one strict policy."""
    for path, status in {
        "/": 200,
        "/activity/": 200,
        "/feeds/samples/harbour-notes.rss": 200,
        "/admin/": 200,
        "/feeds/import/": 405,
        "/nowhere/": 404,
    }.items():
        answer = visitor.get(path)
        assert (answer.status_code, answer.headers["Content-Security-Policy"]) == (status, POLICY)
    answer = visitor.send("/feeds/import/", {"url": "http://127.0.0.1/"})
    assert (answer.status_code, answer.headers["Content-Security-Policy"]) == (403, POLICY)


def test_what_can_not_be_asked_is_not_known(tmp_path: Path) -> None:
    """A table that does not answer makes its part of the page unknown, and not empty."""
    env = environment(tmp_path)
    migrate(env)
    for table, panel in [
        ("django_celery_safe_outboxmessage", "messages"),
        ("django_celery_safe_stagestep", "runs"),
        ("albums_album", "totals-unknown"),
    ]:
        page = execute(
            env,
            f"""
            from django.db import connection
            from django.test import Client
            from django.utils import timezone
            from django_celery_safe.models import StageRun
            now = timezone.now()
            StageRun.objects.create(stages=1, created_at=now, stage_at=now)
            connection.cursor().execute("DROP TABLE {table}")
            print(Client().get("/", headers={{"host": "localhost"}}).text)
            """,
        )
        (part,) = re.findall(rf'id="{panel}".*?(?:</article>|</p>)', page, re.DOTALL)
        assert "Not known" in part
