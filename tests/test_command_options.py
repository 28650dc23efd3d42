"""Django's own options of every command, before and after the action."""

import pytest
from django.core.management import load_command_class

#: Each command with all its actions.
ACTIONS = {
    "celery_locks": ["list", "show x", "release x", "doctor"],
    "celery_outbox": [
        "relay", "status", "list", "show 1", "retry 1", "discard 1", "prune --older-than 1d",
    ],
    "celery_idempotency": ["list", "show x", "forget x", "prune"],
    "celery_stages": [
        "list", "show 1", "resume 1", "abort 1", "sweep", "prune --older-than 1d",
    ],
}  # fmt: skip
OPTIONS = [
    "--settings=tests.settings", "--pythonpath=.", "-v 2", "--verbosity=3", "--traceback",
    "--no-color", "--force-color",
]  # fmt: skip


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("command", ACTIONS)
def test_options_of_django_may_stand_on_either_side(command: str, option: str) -> None:
    """An option means the same before and after the action, and without it nothing changes."""
    for action in ACTIONS[command]:
        parser = load_command_class("django_celery_safe", command).create_parser("manage.py", "x")
        words, given = action.split(), option.split()
        before = vars(parser.parse_args([*given, *words]))
        assert vars(parser.parse_args([*words, *given])) == before
        assert vars(parser.parse_args(words)) != before
