"""The command lines of all commands: Django's own options, and the help of each action."""

import pytest
from django.core.management import load_command_class

#: Each command with all its actions.
ACTIONS = {
    "celery_locks": ["list", "show x", "release x", "doctor"],
    "celery_outbox": ["relay", "status", "list", "show 1", "retry 1", "discard 1"],
    "celery_stages": ["list", "show 1", "resume 1", "abort 1"],
}


@pytest.mark.parametrize("command", ACTIONS)
def test_options_of_django_may_stand_on_either_side(command: str) -> None:
    """An option means the same before and after the action, and without it nothing changes."""
    parser = load_command_class("django_celery_safe", command).create_parser("manage.py", "x")
    for option in ("--settings=tests.settings", "-v 2", "--traceback", "--no-color"):
        for action in ACTIONS[command]:
            words, given = action.split(), option.split()
            before = vars(parser.parse_args([*given, *words]))
            assert vars(parser.parse_args([*words, *given])) == before
            assert vars(parser.parse_args(words)) != before
