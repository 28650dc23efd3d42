"""The pytest plugin, where nobody asked for it."""

import pytest

pytest_plugins = ["pytester"]

PLAIN = """
import sys


def test_nothing_is_loaded():
    assert "pytest_django_celery_safe" in sys.modules
    ours = ("celery", "django_celery_safe")
    assert [name for name in sys.modules if name.partition(".")[0] in ours] == []
    from django.conf import settings

    assert not settings.configured
"""


def test_it_harms_nobody(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder without Django settings tests run, and nothing of the package is imported."""
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    pytester.makepyfile(test_plain=PLAIN)
    pytester.runpytest_subprocess("-p", "no:randomly").assert_outcomes(passed=1)
