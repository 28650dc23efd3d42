"""The scenarios, in the order in which they are listed."""

from importlib import import_module

from tests.faults.scenario import Scenario

#: The description of each scenario.
SUMMARIES = {
    "locks": "locks whose holders are paused, in stores that may lose their memory",
    "tasks": "single-instance tasks, sent twice at once, while workers are killed",
    "outbox": "transactions that send while senders, relays and the broker die",
    "stages": "runs of stages, messages twice, workers killed, the broker restarted",
    "carried": "tasks until they are done, while workers, relay and broker lose them",
    "resumable": "loops over a table while children are killed and workers shut down",
}


def load(name: str) -> Scenario:
    """Put a scenario together from the modules of its folder."""
    folder = f"{__package__}.{name}"
    recording = import_module(f"{folder}.scenario")
    oracle = import_module(f"{folder}.oracle").ORACLE
    variants = getattr(recording, "VARIANTS", {})
    return Scenario(name, SUMMARIES[name], recording.Plan, recording.record, oracle, variants)


SCENARIOS = tuple(map(load, SUMMARIES))
