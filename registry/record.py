"""What a worker says of itself in Redis. Owned by the worker; routers read it. Unknown fields are ignored when read, so
that versions may differ within a fleet."""

from __future__ import annotations

import msgspec

ROLES = ("prefill", "decode", "aggregated")


class WorkerLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """How busy a worker was at its last heartbeat (inference.proto, Load). Routers hear it sooner on their sessions."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's registration. Two workers are a pair only if their ``compatibility`` is equal."""

    worker_id: str
    role: str
    """prefill | decode | aggregated"""
    address: str
    """host:port of its gRPC server, as others reach it."""
    incarnation: int
    """Newer is larger; a restart is a new one."""
    fingerprint: str
    """Of the weights, config and rope."""
    model: str
    max_model_len: int
    pool_tokens: int
    """Tokens that its KV pool holds: a longer prompt can never run there."""
    hash_block_tokens: int
    block_size: int = 0
    """Tokens of its blocks, a multiple of hash_block_tokens; 0: the same."""
    kv_wire: str = ""
    """Version of the KV's format on the wire, and its digest; empty: not said (an older version)."""
    draining: bool = False
    """It leaves: send it nothing new."""
    load: WorkerLoad = WorkerLoad()

    @property
    def compatibility(self) -> tuple[str, int, str]:
        """What must be equal for KV to move between two workers."""
        return self.fingerprint, self.hash_block_tokens, self.kv_wire
