"""Fixtures: runs in a database of the test, whose messages are delivered by hand."""

from collections.abc import Iterator

import pytest

from tests.concurrency.mailbox import Mailbox
from tests.routing import runs_in
from tests.stages.test_messages import Staged


@pytest.fixture
def staged(mailbox: Mailbox, db_alias: str) -> Iterator[Staged]:
    """Runs in a database that has no others."""
    with runs_in(db_alias):
        yield Staged(mailbox, db_alias)


@pytest.fixture
def eager(staged: Staged) -> Staged:
    """Tasks run at once, in this process."""
    staged.mailbox.app.conf.task_always_eager = True
    return staged
