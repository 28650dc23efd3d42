"""The id of this process, known without a system call: each lock would make seven of them."""

from __future__ import annotations

import os

pid = os.getpid()


def _renew() -> None:
    global pid
    pid = os.getpid()


# First of all: what else begins anew in a forked child may ask for it.
os.register_at_fork(after_in_child=_renew)
