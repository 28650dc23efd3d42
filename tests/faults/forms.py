"""The runs of ``all``: each scenario as it is meant, and each deliberate fault, to be found."""

from collections.abc import Iterator, Mapping
from typing import Final

from tests.faults.scenario import Scenario

#: For each form its runs without a deliberate fault, as the command line has them.
FORMS: Final[dict[str, tuple[str, ...]]] = {
    # With one fault of each scenario about five minutes.
    "short": (
        "locks --operations 10000",
        "locks --operations 10000 --limit 3 --nemesis restart",
        "tasks --tasks 200 --worker-kills 1",
        "outbox --transactions 60 --rounds 1 --random-kills 2",
        "stages --runs 20 --child-kills 40",
        "carried --tasks 200 --child-kills 8 --worker-kills 1 --pauses 2 --restarts 1 --flushes 1",
        "resumable --rows 20000 --child-kills 20 --worker-kills 1 --shutdowns 1",
    ),
    # With all faults about an hour.
    "long": (
        "locks",
        "locks --limit 3",
        "locks --operations 50000 --nemesis restart",
        "locks --operations 20000 --store postgres",
        "tasks",
        "outbox",
        "outbox --broker rabbitmq",
        "stages",
        "carried --tasks 5000 --child-kills 100 --worker-kills 10 --relay-kills 4 --restarts 6",
        "carried --broker rabbitmq",
        "resumable --rows 100000 --child-kills 1000 --worker-kills 50 --shutdowns 10",
        "resumable --broker rabbitmq --database mariadb",
    ),
    # All faults and nothing else.
    "faults": (),
}

#: The options of a small run of each scenario, long enough for a deliberate fault to be found.
SMALL: Final[dict[str, str]] = {
    "locks": "--operations 4000 --processes 4",
    "outbox": "--transactions 80 --rounds 2 --random-kills 2",
    "stages": "--runs 10 --steps 6 --child-kills 20",
    "carried": (
        "--tasks 200 --child-kills 8 --worker-kills 0 --relay-kills 0 --pauses 4 --restarts 0 "
        "--flushes 0 --database-restarts 0"
    ),
    "resumable": "--rows 10000 --tasks 4 --child-kills 20 --worker-kills 0 --shutdowns 0",
}


def commands(form: str, scenarios: Mapping[str, Scenario]) -> Iterator[list[str]]:
    """Yield the runs of a form: a scenario's name, and its options."""
    for command in FORMS[form]:
        yield command.split()
    for name, scenario in scenarios.items():
        for fault in list(scenario.variants)[: 1 if form == "short" else None]:
            yield [name, *SMALL[name].split(), "--broken", fault]
