"""
How locks in a cluster send their commands: :class:`ClusterWire`, with a wire for each node.

The cache's client is only used to find the nodes. It does not send the commands, because it
repeats a command that was not answered, and a repeated release would report a lost lock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from redis import ConnectionPool, Redis, exceptions

from .wire import CLIENT_ERRORS, Wire

#: Errors for a slot that is moving; the command was not run.
MOVING: Final = (exceptions.MovedError, exceptions.AskError, exceptions.TryAgainError)
#: Pauses, s, between tries of a command that a cluster refuses because it is moving the slot.
#: Moving the few keys of a slot takes some milliseconds; the sum is less than a waiter's pop.
PAUSES: Final = (0.0, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32)


def is_cluster(client: Any) -> bool:
    """Return whether a client is a cluster client, which has a pool for each node."""
    return hasattr(client, "nodes_manager")


class ClusterWire:
    """
    Sends each command to the node that has the slot of its key.

    It has the methods of :class:`Wire`, and threads may share it as well. If a node does not
    answer, the command fails, and the client asks the other nodes where the slots are now,
    because a replica may have taken over.
    """

    #: A cluster has no Sentinel.
    service_name = None

    def __init__(self, client: Any) -> None:
        self.client = client
        #: The wire of each node, by host and port, and the node that has each hash tag's slot.
        self._wires: dict[tuple[str, int], Wire] = {}
        self._routes: dict[str, tuple[str, int]] = {}

    @property
    def options(self) -> dict[str, Any]:
        """The cache's settings for each connection."""
        options: dict[str, Any] = self.client.get_connection_kwargs()
        return options

    def node_of(self, key: str) -> tuple[str, int]:
        """Return host and port of the node that has the key's slot, according to the client."""
        tag = key.partition("}")[0]
        node = self._routes.get(tag)
        if node is None:
            found = self.client.get_node_from_key(tag + "}")
            node = self._routes[tag] = (found.host, found.port)
        return node

    def known_node(self, key: str) -> tuple[str, int] | None:
        """Return host and port of the last known node for the key's slot; None: none so far."""
        return self._routes.get(key.partition("}")[0])

    def nodes(self) -> frozenset[tuple[str, int]]:
        """Return host and port of each primary."""
        return frozenset((node.host, node.port) for node in self.client.get_primaries())

    def primaries(self) -> list[Wire]:
        """Return the wires of all primaries."""
        return [self._wire_at(node) for node in sorted(self.nodes())]

    def ask(self, *command: str, within: float | None = None) -> Any:
        """Do what :meth:`Wire.ask` does, wherever the slot is, even while it is being moved."""
        ends_at = None if within is None else time.monotonic() + within
        for pause in PAUSES:
            try:
                return self._at_node(command, lambda wire: wire.ask(*command, within=within))
            except exceptions.MovedError as error:
                self._follow(command, error)
            except exceptions.AskError as error:
                with suppress(*MOVING):
                    importer = self._wire_at(self._named(command, error))
                    return importer.ask_importer(*command, within=within)
            except exceptions.ResponseError as error:
                if not self._is_moving(error):
                    raise
            if ends_at is not None and time.monotonic() + pause > ends_at:
                break
            time.sleep(pause)
        return self._at_node(command, lambda wire: wire.ask(*command, within=within))

    def ask_counted(self, *command: str) -> tuple[Any, bool]:
        """Do what :meth:`Wire.ask_counted` does."""
        try:
            answer: tuple[Any, bool] = self._at_node(command, lambda at: at.ask_counted(*command))
        except exceptions.ResponseError as error:
            # The node did not run the command, so the next try counts as the first.
            if not self._is_moving(error):
                raise
            return self.ask(*command), False
        return answer

    def ask_after_pop(self, key: str, seconds: float, *command: str) -> Any:
        """Do what :meth:`Wire.ask_after_pop` does."""
        try:
            return self._at_node(command, lambda wire: wire.ask_after_pop(key, seconds, *command))
        except exceptions.ResponseError as error:
            if not self._is_moving(error):
                raise
            return self.ask(*command)

    def close(self) -> None:
        """Close the connections; the next command opens a new one."""
        for wire in list(self._wires.values()):
            wire.close()

    def _at_node(self, command: tuple[str, ...], ask: Callable[[Wire], Any]) -> Any:
        try:
            return ask(self._wire_at(self._node_for(command)))
        except exceptions.ClusterDownError:
            # The node did not run the command. It may have been removed from the cluster, or be
            # cut off from it, while another node has the slot.
            self._look_again()
            return ask(self._wire_at(self._node_for(command)))
        except exceptions.ResponseError:
            raise
        except CLIENT_ERRORS:
            self._look_again()
            raise

    def _node_for(self, command: tuple[str, ...]) -> tuple[str, int]:
        key = _key_of(command)
        return min(self.nodes()) if key is None else self.node_of(key)

    def _wire_at(self, node: tuple[str, int]) -> Wire:
        wire = self._wires.get(node)
        if wire is None:
            # The client may not know this node yet: use the settings of a known node, with
            # this node's host and port.
            known = self.client.get_primaries()[0]
            pool = self.client.get_redis_connection(known).connection_pool
            options = {**pool.connection_kwargs, "host": node[0], "port": node[1]}
            own = ConnectionPool(pool.connection_class, **options)
            wire = self._wires.setdefault(node, Wire(Redis(connection_pool=own)))
        return wire

    def _is_moving(self, error: Exception) -> bool:
        # A script may fail on a waiter's mark that has been moved to the other node already.
        return isinstance(error, MOVING) or "non local key" in str(error)

    def _follow(self, command: tuple[str, ...], error: Any) -> None:
        key = _key_of(command)
        if key is not None:
            self._routes[key.partition("}")[0]] = self._named(command, error)

    def _named(self, command: tuple[str, ...], error: Any) -> tuple[str, int]:
        """Return the node that an error names; if it names no host, the answering node's host."""
        host = error.host or self._node_for(command)[0]
        host, port = self.client.nodes_manager.remap_host_port(host, error.port)
        return host, port

    def _look_again(self) -> None:
        """Have the client ask the nodes that it can reach where the slots are now."""
        with suppress(*CLIENT_ERRORS):
            self.client.nodes_manager.initialize()
        self.close()
        self._wires.clear()
        self._routes.clear()


def _key_of(command: tuple[Any, ...]) -> str | None:
    """Return the key that decides which node gets a command; None: any node will do."""
    if command[0] in {"INFO", "TIME"}:
        return None
    key = command[1]
    if command[0] in {"EVALSHA", "EVAL"}:
        if command[2] == "0":
            return None
        key = command[3]
    # Keys from a list of locks are bytes.
    return key if isinstance(key, str) else key.decode("utf-8", "replace")
