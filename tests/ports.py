"""Ports for what tests start: known before a process binds them and after it died."""

from __future__ import annotations

from pdserve.up.plan import free_ports

_given: set[int] = set()


def free_port() -> int:
    """A free port that this test process gets only once. It is none that the kernel takes for connections or for "any
    port": between the choice and the start of the process one of those could be gone."""
    while (port := free_ports(1)[0]) in _given:
        pass
    _given.add(port)
    return port
