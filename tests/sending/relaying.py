"""Helpers of the tests of relays: races in several processes, and brokers that are silent."""

import socket
from contextlib import suppress


def count_calls(server: socket.socket) -> int:
    """Return how often somebody connected to a listening socket since the last time."""
    number = 0
    with suppress(BlockingIOError):
        while True:
            server.accept()[0].close()
            number += 1
    return number
