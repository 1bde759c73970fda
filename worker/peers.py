"""Whether a worker can reach the other side of its hand-offs: part of being ready, so that a rollout whose new workers
nobody can pair with stops, instead of taking the old ones away.

A look at the registry names the compatible workers of the other role; any answer of one of them is enough, whether it
is ready or not (two that start together would else wait for each other). Once reached, it is not asked again: a peer
that is lost later is the router's business, and must not make this worker unready, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.channel import open_channel
from pdserve.tls import Tls
from registry import RegistryUnavailable, WorkerRecord, WorkerRegistry

LOOK_S = 0.5
ANSWER_S = 1.0
MAX_ASKED = 8
"""At one look; the next one asks others."""

OTHER_ROLE = {"prefill": "decode", "decode": "prefill"}
_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

log = logging.getLogger(__name__)


class PeerCheck:
    """``run`` it in a task; ``why_not`` is the reason why this worker should not be ready, or None."""

    def __init__(
        self, registry: WorkerRegistry, record: Callable[[], WorkerRecord | None], tls: Tls | None = None
    ) -> None:
        """``record``: this worker's, None while it has none. The registry is closed by its owner."""
        self.why_not: str | None = "no other worker was looked for yet"
        self._registry = registry
        self._record = record
        self._tls = tls
        self._looks = 0

    async def run(self) -> None:
        """Until cancelled; busy only until the answer is known."""
        while self.why_not is not None:
            if (record := self._record()) is not None:
                self.why_not = await self._look(record)
            if self.why_not is not None:
                await asyncio.sleep(LOOK_S)
        await asyncio.Event().wait()

    async def _look(self, me: WorkerRecord) -> str | None:
        try:
            records = await self._registry.list_workers()
        except RegistryUnavailable as error:
            return f"other workers are not known: {error}"
        peers = [record for record in records if is_peer(me, record)]
        if not peers:
            return None
        self._looks += 1
        start = self._looks * MAX_ASKED % len(peers)
        asked = (peers[start:] + peers[:start])[:MAX_ASKED]
        answers = await asyncio.gather(*(answers_at(peer.address, self._tls) for peer in asked))
        for peer, is_there in zip(asked, answers, strict=True):
            if is_there:
                log.info("reached %s worker %s", peer.role, peer.worker_id)
                return None
        return f"no {peers[0].role} worker can be reached: " + ", ".join(f"{p.worker_id} at {p.address}" for p in asked)


def is_peer(me: WorkerRecord, other: WorkerRecord) -> bool:
    """Whether the two would hand KV over."""
    return OTHER_ROLE.get(me.role) == other.role and me.compatibility == other.compatibility


async def answers_at(address: str, tls: Tls | None = None) -> bool:
    """Whether a gRPC server answers there, whatever it says."""
    try:
        opened = open_channel(address, tls)
    except OSError as error:  # the certificate is just being replaced: the next look reads it again
        log.warning("the certificate cannot be read: %s", error)
        return False
    async with opened as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            return error.code() not in _NO_ANSWER
    return True
