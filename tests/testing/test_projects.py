"""A user's project, whose own tests are run: by Django and by pytest, right and wrong."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import dead_port
from tests.servers import RedisServer

SHOP = Path(__file__).with_name("shop")
ROOT = SHOP.parent.parent.parent

pytestmark = pytest.mark.long

#: Each test of the shop runs in a transaction and with commits.
TESTS = {
    "test_sign_up_sends_on_commit",
    "test_welcome_is_sent_once",
    "test_outbox_is_run",
    "test_full_import_waits",
    "test_report_in_memory",
    "test_album_gets_ready",
}


@pytest.fixture
def shop(tmp_path: Path, redis_server: RedisServer) -> Path:
    """A folder with the project."""
    redis_server.flush()
    folder = tmp_path / "site"
    shutil.copytree(SHOP, folder / "shop", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "shop" / "tests_for_django.py").rename(folder / "shop" / "tests.py")
    (folder / "shop" / "tests_for_pytest.py").rename(folder / "test_shop.py")
    (folder / "pytest.ini").write_text(
        "[pytest]\nDJANGO_SETTINGS_MODULE = shop.settings\npythonpath = .\n"
        "filterwarnings = error\naddopts = -p no:cacheprovider\n"
    )
    return folder


@pytest.fixture
def environment(redis_server: RedisServer) -> dict[str, str]:
    """The project's settings, with SQLite in memory as the database."""
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("DJANGO_")},
        "PYTHONPATH": str(ROOT),
        "SHOP_DATABASE": json.dumps(sqlite),
        "SHOP_CACHE": redis_server.url,
        "SHOP_BROKER": f"redis://127.0.0.1:{dead_port()}/0",
    }


def run(
    folder: Path, environment: dict[str, str], *command: str
) -> subprocess.CompletedProcess[str]:
    """Run Python in the project."""
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def by_django(folder: Path, environment: dict[str, str]) -> Any:
    """Run the tests as a project without pytest does."""
    return run(folder, environment, "-m", "django", "test", "--settings=shop.settings", "shop")


def by_pytest(folder: Path, environment: dict[str, str]) -> Any:
    """Run the tests by pytest-django, in random order."""
    return run(folder, environment, "-m", "pytest", "-rA", "--tb=short", "-q")


@pytest.mark.parametrize(
    ("run_tests", "output", "said"),
    [
        (by_django, "stderr", f"Ran {2 * len(TESTS)} tests"),
        (by_pytest, "stdout", "4 passed"),
    ],
)
def test_the_tests_pass(
    run_tests: Callable[[Path, dict[str, str]], Any],
    output: str,
    said: str,
    shop: Path,
    environment: dict[str, str],
) -> None:
    """
    They pass in TestCase and TransactionTestCase, by ``manage.py test`` and by pytest.

    Pytest needs the fixtures alone, which no ``conftest.py`` names.
    """
    done = run_tests(shop, environment)
    assert done.returncode == 0, getattr(done, output)
    assert said in getattr(done, output)


def test_every_mistake_is_told(shop: Path, environment: dict[str, str]) -> None:
    """The helpers show each mistake."""
    done = by_django(shop, {**environment, "SHOP_WRONG": "1"})
    told = re.findall(r"^(?:FAIL|ERROR): (\w+) ", done.stderr, re.MULTILINE)
    assert sorted(told) == sorted([*TESTS, *TESTS]), done.stderr


def test_a_forgotten_with_fails(shop: Path, environment: dict[str, str]) -> None:
    """A test that makes a block and never enters it has looked at nothing, and is told so."""
    (shop / "test_shop.py").write_text(FORGETFUL)
    done = by_pytest(shop, environment)
    for name in ("hold_lock", "assert_sent_on_commit"):
        assert f"{name}(...) did nothing: write `with {name}(...):`." in done.stdout
    assert "2 passed, 2 errors" in done.stdout


# The plugin, where nobody asked for it.


def test_it_harms_nobody(tmp_path: Path, environment: dict[str, str]) -> None:
    """In a folder without Django settings tests run, and nothing of the package is imported."""
    (tmp_path / "test_plain.py").write_text(PLAIN)
    done = run(tmp_path, environment, "-m", "pytest", "-q", "-p", "no:randomly")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


FORGETFUL = """
from shop.tasks import welcome


def test_a_lock(hold_lock):
    hold_lock("report")


def test_a_send(assert_sent_on_commit):
    assert_sent_on_commit(welcome, 1)
"""

PLAIN = """
import sys


def test_nothing_is_loaded():
    assert "pytest_django_celery_safe" in sys.modules
    ours = ("celery", "django_celery_safe")
    assert [name for name in sys.modules if name.partition(".")[0] in ours] == []
    from django.conf import settings

    assert not settings.configured
"""
