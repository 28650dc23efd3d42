"""
The client libraries that the Redis store supports: redis-py and its fork valkey-py.

:func:`library_of` returns the classes, errors and packer of a library, under the same names for
both. Each works without the other being installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple

Error = type[Exception]

#: For each package: its client class, the prefix of its errors' names, the package that packs
#: its commands, and the name of the flag that says whether that package is installed.
NAMES: Final = {
    "redis": ("Redis", "Redis", "hiredis", "HIREDIS_AVAILABLE"),
    "valkey": ("Valkey", "Valkey", "libvalkey", "LIBVALKEY_AVAILABLE"),
}


class Library(NamedTuple):
    """The parts of a client library that a store and its wires use."""

    name: str
    client: Any
    pool: Any
    #: Returns a retry policy for a connection that must fail at once.
    never_retry: Callable[[], Any]
    #: Packs a command that has only texts; None: the connection's own method is the fastest.
    pack: Callable[[tuple[Any, ...]], bytes] | None
    #: All errors of the library (including those below) and of the operating system.
    any_error: tuple[Error, ...]
    connection_error: Error
    timeout_error: Error
    response_error: Error
    read_only: Error
    no_script: Error
    #: A cluster node names the node that has the slot, or that is taking it over.
    moved: Any
    ask: Any
    try_again: Error
    #: A cluster node does not know which node has the slot, or is cut off from the others.
    cluster_down: Error


def library_of(client: Any) -> Library:
    """Return the library of a client, or of a connection pool, according to its class."""
    packages = {cls.__module__.partition(".")[0] for cls in type(client).__mro__}
    return _load("valkey" if "valkey" in packages else "redis")


@cache
def _load(package: str) -> Library:
    client, prefix, packer, is_there = NAMES[package]
    library, errors = import_module(package), import_module(f"{package}.exceptions")
    retry, backoff = import_module(f"{package}.retry"), import_module(f"{package}.backoff")
    quick = getattr(import_module(f"{package}.utils"), is_there)
    return Library(
        name=package,
        client=getattr(library, client),
        pool=library.ConnectionPool,
        never_retry=lambda: retry.Retry(backoff.NoBackoff(), 0),
        pack=import_module(packer).pack_command if quick else None,
        # Errors that a cluster client itself raises have another base class.
        any_error=(
            getattr(errors, f"{prefix}Error"),
            getattr(errors, f"{prefix}ClusterException"),
            OSError,
        ),
        connection_error=errors.ConnectionError,
        timeout_error=errors.TimeoutError,
        response_error=errors.ResponseError,
        read_only=errors.ReadOnlyError,
        no_script=errors.NoScriptError,
        moved=errors.MovedError,
        ask=errors.AskError,
        try_again=errors.TryAgainError,
        cluster_down=errors.ClusterDownError,
    )
