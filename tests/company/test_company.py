"""Every flow beside every neighbour, on real workers."""

from pathlib import Path

import pytest
from pytest_django import DjangoDbBlocker

from tests.company.matrix import NotInstalled, play
from tests.company.neighbours import NEIGHBOURS
from tests.conftest import leave_out
from tests.servers.databases import Databases

#: Each in a landing, or at night.
CASES = [
    pytest.param(name, marks=pytest.mark.long if here.landing else pytest.mark.nightly)
    for name, here in NEIGHBOURS.items()
]
#: Flows that are known to go wrong, by neighbour, and why; each must go wrong.
REFUSED = "it refuses to begin in a transaction: others would not see that it does"
KNOWN: dict[str, dict[str, str]] = {"a task class with atomic()": {"idempotent": REFUSED}}


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("redis_server", "postgres_server")
@pytest.mark.parametrize("name", CASES)
def test_beside(
    name: str,
    _databases: Databases,  # noqa: PT019 - it has a value
    tmp_path: Path,
    django_db_blocker: DjangoDbBlocker,
) -> None:
    """Every flow has its right values beside a neighbour."""
    try:
        with django_db_blocker.unblock():
            verdicts = play(name, _databases, tmp_path)
    except NotInstalled as error:
        leave_out(f"{name} ({error})")
    wrong = {flow: why for flow, why in verdicts.items() if why}
    assert wrong.keys() == KNOWN.get(name, {}).keys(), f"beside {name}: {wrong}"
