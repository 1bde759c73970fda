"""What becomes of a preempted request's KV: it waits in host memory, or is computed again, whichever costs less.

Owns who has which slot of the host memory (``host_kv`` owns the bytes), the cost model, and the copies that the next
step begins with. Knows no devices. Called by the scheduler; the core carries the copies out, in order, before the step.

    preempted --offload--> slots --restore--> blocks, and its slots are free         (ended meanwhile: forget)
              '--no slots, or cheaper--> nothing is kept: its tokens are computed again
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.messages import EngineStats
from engine.request import Request

_RATE_DECAY = 0.999
"""Of the best rate seen, per step: a lucky one does not count for ever."""


class HostMemory(Protocol):
    """What is asked of ``HostKV``."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def bytes_per_s(self) -> float: ...

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None: ...
    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Between blocks of the pool and slots of the host memory, in pairs."""

    is_out: bool
    block_ids: list[int]
    slots: list[int]


class CostModel:
    """Seconds that either way takes. Computing is as fast as the best step of late, which is one that prefills: on a
    worker that only decodes, where prefilling would hold up everybody's decodes, it seems as slow as it would feel."""

    def __init__(self, block_bytes: int, bytes_per_s: float) -> None:
        self._block_s = 2 * block_bytes / bytes_per_s
        """Out and in."""
        self._tokens_per_s = 0.0

    def step_took(self, num_tokens: int, seconds: float) -> None:
        self._tokens_per_s = max(self._tokens_per_s * _RATE_DECAY, num_tokens / max(seconds, 1e-9))

    def prefers_copies(self, num_blocks: int, num_tokens: int) -> bool:
        """Before the first step nothing is known of computing; then there is nothing to preempt, either."""
        return self._tokens_per_s == 0 or num_blocks * self._block_s <= num_tokens / self._tokens_per_s


class Offload:
    """Without host memory everything is computed again."""

    def __init__(self, memory: HostMemory | None, counters: EngineStats) -> None:
        self.costs = CostModel(memory.block_bytes, memory.bytes_per_s) if memory is not None else None
        self.num_slots = 0 if memory is None else memory.num_blocks
        self._block_bytes = 0 if memory is None else memory.block_bytes
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._copies: list[BlockCopy] = []
        self._counters = counters

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def offload(self, request: Request, num_blocks: int) -> None:
        """The request, which holds its blocks still, is preempted; the first ``num_blocks`` of them hold its KV."""
        num_tokens = request.num_computed_tokens
        if self.costs is None or not 0 < num_blocks <= len(self._free):
            return
        if not self.costs.prefers_copies(num_blocks, num_tokens):
            return
        request.host_slots = [self._free.pop() for _ in range(num_blocks)]
        request.num_host_tokens = num_tokens
        self._copies.append(BlockCopy(True, request.block_table[:num_blocks], request.host_slots))
        self._counters.offloaded_blocks_total += num_blocks
        self._counters.offloaded_bytes_total += num_blocks * self._block_bytes

    def restore(self, request: Request, num_cached: int) -> None:
        """The request has blocks again, the first ``num_cached`` of them out of the prefix cache: the rest comes back.

        Its tokens up to what was offloaded count as computed; its slots are free.
        """
        slots, request.host_slots = request.host_slots, []
        if len(slots) > num_cached:
            blocks = request.block_table[num_cached : len(slots)]
            self._copies.append(BlockCopy(False, blocks, slots[num_cached:]))
            self._counters.restored_blocks_total += len(blocks)
        request.num_computed_tokens = max(request.num_computed_tokens, request.num_host_tokens)
        request.num_host_tokens = 0
        self._free += slots

    def forget(self, request: Request) -> None:
        """The request ended. Between steps only: no copy of its is waiting."""
        self._free += request.host_slots
        request.host_slots = []
        request.num_host_tokens = 0

    def take_copies(self) -> list[BlockCopy]:
        copies, self._copies = self._copies, []
        return copies
