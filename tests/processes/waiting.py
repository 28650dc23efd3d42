"""Waiting for a condition instead of sleeping, and ports that nobody listens on."""

import random
import socket
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

#: Seconds between two looks at a condition.
POLL_INTERVAL = 0.02

#: Below Linux's range for outgoing connections (32768 up), so that no client
#: socket takes a server's port while the server is stopped.
PORTS = range(20000, 32768)

# The global generator is seeded by pytest-randomly: two runs with one seed would
# try the same ports in the same order.
_random = random.SystemRandom()


def wait_for(
    condition: Callable[[], Result],
    timeout: float = 30,
    message: str = "the condition did not become true",
) -> Result:
    """
    Call ``condition`` until it returns something true, and return that.

    Args:
        timeout: Seconds to wait at most; the condition is asked once more at the end.
        message: The event that did not happen, for the error.

    Raises:
        TimeoutError: It stayed false.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline
        if result := condition():
            return result
        if late:
            raise TimeoutError(f"After {timeout:g} s: {message}.")
        time.sleep(POLL_INTERVAL)


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that nobody listens on right now."""
    for _ in range(1000):
        port = _random.choice(PORTS)
        if port_is_free(port):
            return port
    raise RuntimeError("No free port found on 127.0.0.1.")


def reserve_port() -> tuple[int, socket.socket]:
    """
    Return a free port, and the socket that keeps it from others until the socket is closed.

    A server that is prepared for seconds would otherwise lose its port to one that is quicker.
    """
    while True:
        # Without SO_REUSEADDR: another socket can't be bound to the port beside this one.
        reservation = socket.socket()
        try:
            reservation.bind(("127.0.0.1", port := free_port()))
        except OSError:  # taken since the look
            reservation.close()
        else:
            return port, reservation


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
