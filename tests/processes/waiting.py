"""Waiting for a condition instead of sleeping, and ports that nobody listens on."""

import random
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TypeVar

Result = TypeVar("Result")

#: Seconds between two looks at a condition.
POLL_INTERVAL = 0.02

#: Below Linux's range for outgoing connections (32768 up): a server that listens on
#: all addresses of the machine needs its port on each of them.
PORTS = range(20000, 32768)

#: The reservations behind ``dead_port``, which stay open until the process ends.
_dead: list[ExitStack] = []

# The global generator is seeded by pytest-randomly: two runs with one seed would
# try the same ports in the same order.
_random = random.SystemRandom()


def wait_for(
    condition: Callable[[], Result],
    timeout: float = 30,
    message: str = "the condition did not become true",
    look: float = POLL_INTERVAL,
) -> Result:
    """
    Call ``condition`` until it returns something true, and return that.

    Args:
        timeout: Seconds to wait at most; the condition is asked once more at the end.
        message: The event that did not happen, for the error.
        look: Seconds between two looks.

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
        time.sleep(look)


def dead_port() -> int:
    """Return a TCP port of 127.0.0.1 that refuses connections until this process ends."""
    port, reservation = reserve_port()
    _dead.append(reservation)
    return port


def reserve_port(distance: int = 0) -> tuple[int, ExitStack]:
    """
    Return a free port, and the reservation that keeps it from others until it is closed.

    A server that binds with SO_REUSEADDR, as most do, may start and stop on the port meanwhile.
    While no server listens, clients are refused.

    Args:
        distance: Also keep the port that is higher by this number; 0: only one port.
    """
    for _ in range(1000):
        port = _random.choice(PORTS)
        with ExitStack() as stack, suppress(OSError):
            for one in {port, port + distance}:
                # Bound, but not listening: Linux refuses those who connect.
                holder = stack.enter_context(socket.socket())
                # Without SO_REUSEADDR, bind() fails if any other socket is bound to the port, so
                # two processes can't hold the same one. Setting the option afterwards lets a
                # server that sets it too bind the port as well.
                holder.bind(("127.0.0.1", one))
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return port, stack.pop_all()
    raise RuntimeError("No free port found on 127.0.0.1.")


def port_is_free(port: int) -> bool:
    """Whether a server could listen on this port now, perhaps a reserved one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
