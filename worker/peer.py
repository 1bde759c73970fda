"""Names of hand-off control streams, as they travel between the service and its engine (``PeerFrame.peer``).

The prefill engine makes the name of the decode worker that it wants to talk to; the service opens the stream to it. The
decode service makes the names of the streams that come in, a new one for each stream.
"""

from __future__ import annotations

from typing import NamedTuple


class Peer(NamedTuple):
    """A decode worker to talk to. Another incarnation is another peer."""

    worker_id: str
    incarnation: int
    address: str

    def encode(self) -> str:
        return f"{self.incarnation} {self.address} {self.worker_id}"


def decode_peer(name: str) -> Peer:
    incarnation, address, worker_id = name.split(" ", 2)
    return Peer(worker_id, int(incarnation), address)
