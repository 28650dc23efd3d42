"""Faults of the settings, and of the cache or database in which they keep locks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Final

from .. import conf
from ..exceptions import ConfigurationError
from ..inspection import lock_store
from ..inspection.findings import Finding, fault
from ..locks.stores import locate
from ..sending.outbox import checked_outbox

#: Settings that are durations, each with what reads and refuses it.
DURATIONS: Final[dict[str, Callable[[str], object]]] = {
    "LOCK_TIMEOUT": lambda name: conf.lease_seconds(conf.get(name), name),
    "SENT_TIMEOUT": lambda name: conf.lease_seconds(conf.get(name), name),
    "OUTBOX_SEND_TIMEOUT": conf.send_timeout,
    "OUTBOX_RETENTION": conf.retention,
    "STAGES_RETENTION": conf.retention,
    "IDEMPOTENCY_RETENTION": lambda name: conf.ttl(conf.get(name), name),
}
SWITCHES: Final = ("SEND_ON_COMMIT", "WARN_IN_ATOMIC", "SHOW_ARGUMENTS")


def find_setting_faults() -> Iterator[Finding]:
    """W001: a setting that does not exist. E001: a setting whose value is not valid."""
    for name, meant in conf.unknown().items():
        hint = f"Did you mean {meant!r}?" if meant else f"It knows: {', '.join(conf.DEFAULTS)}."
        yield fault("W001", f"{conf.NAME} has no setting {name!r}; it does nothing.", hint)
    for name, read in DURATIONS.items():
        try:
            read(name)
        except ConfigurationError as error:
            default = conf.DEFAULTS[name]
            unit = (
                f"{default.days} days" if isinstance(default, timedelta) else f"{default} seconds"
            )
            yield fault("E001", str(error), f"The default is {unit}.")
    for name in SWITCHES:
        if not isinstance(value := conf.get(name), bool):
            text = f"{name}={value!r} is neither True nor False."
            yield fault("E001", text, f"The default is {conf.DEFAULTS[name]}.")
    try:
        checked_outbox(conf.get("OUTBOX"))
    except ConfigurationError as error:
        yield fault(
            "E001", f"The setting OUTBOX: {error}", f"The default is {conf.DEFAULTS['OUTBOX']}."
        )


def find_store_faults() -> Iterator[Finding]:
    """E002, E003: locks can't live there. W002: processes don't share them. W004: it loses some."""
    place = lock_store.find_place()
    yield place
    if not place.id:
        yield from filter(None, [lock_store.find_weakness(locate().store())])


def find_store_trouble() -> Iterator[Finding]:
    """W005: cache.clear() frees locks. E009: they are refused. W006: evicted, or not known."""
    if lock_store.find_place().id:
        return  # find_store_faults says so
    location = locate()
    store = location.store()
    yield lock_store.find_clearing(location)
    try:
        lock_store.try_lock(store)
    except Exception as error:  # noqa: BLE001 - a check must say what it is, whatever it is
        finding = lock_store.explain(error)
        yield finding if finding.id == "W006" else finding._replace(id="E009")
        return
    try:
        yield from filter(None, [lock_store.find_eviction(store)])
    except Exception as error:  # noqa: BLE001 - as above
        yield lock_store.explain(error)._replace(id="W006")
