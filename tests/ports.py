"""Ports for what tests start: known before a process binds them and after it died."""

from __future__ import annotations

import socket

from pdserve.up.plan import free_ports

_given: set[int] = set()


def free_ports_in_a_row(count: int) -> int:
    """The first of ``count`` such ports, one after the other."""
    while True:
        first = free_port()
        others = range(first + 1, first + count)
        if not _given.intersection(others) and all(_is_free(port) for port in others):
            _given.update(others)
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """A free port that this test process gets only once. It is none that the kernel takes for connections or for "any
    port": between the choice and the start of the process one of those could be gone."""
    while (port := free_ports(1)[0]) in _given:
        pass
    _given.add(port)
    return port
