"""Whether a request may have blocks and a seat now. Looks at all who hold some, or were promised some; changes nothing.

    available blocks - one to grow into for each request that decodes, or will          = room of reservations, and P's
                     - what was pledged to requests whose tickets were asked for        = room of those that wait
                     - headroom until it has caught up                                  = room of a preempted request,
                                                     and of reservations, too, while others that came back catch up

Used by the scheduler, which owns the queues.
"""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.block_tables import BlockTables
from engine.config import EngineConfig
from engine.inflight_prefixes import InflightPrefixes
from engine.preemption import headroom, is_catching_up
from engine.request import Request
from engine.request_queue import RequestQueue
from engine.reservations import Reservations
from engine.ticket_desk import TicketDesk


class Room:
    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        blocks: BlockTables,
        inflight: InflightPrefixes,
        running: RequestQueue,
        reservations: Reservations,
        desk: TicketDesk,
    ) -> None:
        self._config = config
        self._pool = pool
        self._blocks = blocks
        self._inflight = inflight
        self._running = running
        self._reservations = reservations
        self._desk = desk
        # Every running request gets a token in every step.
        self._seats = min(config.max_num_seqs, config.max_num_batched_tokens)

    def has_seat(self, promised: int = 0) -> bool:
        """Beside those that run, will run when their KV is here, and ``promised`` others."""
        return len(self._running) + self._reservations.num_seats + promised < self._seats

    def match(self, request: Request) -> tuple[list[int], int, bool]:
        """Published blocks of its prefix, available blocks that admission takes, and whether it is held back now."""
        # The last token is always computed: its logits are what the next token is drawn from.
        cached, lacking = self._blocks.match(request, request.num_tokens - 1)
        blocks = self._blocks.cost(cached, self._blocks.blocks_for(request.num_tokens))
        return cached, blocks, not request.host_slots and self._inflight.hold(request, lacking)

    def of_waiting(self) -> int:
        """Blocks that the admission of one that waits here may take."""
        return self.of_granted() - self._desk.pledged_blocks

    def of_granted(self) -> int:
        """The same of one that has its ticket: each request that decodes, or will, keeps one block to grow into."""
        growing = sum(not request.sends_kv for request in self._running) + self._reservations.num_seats
        return self._pool.num_available - growing

    def of_preempted(self, request: Request, step_tokens: int) -> int:
        """The same of one that comes back and computes ``step_tokens`` in a step."""
        needed = headroom(request, self._running, self._config, step_tokens)
        return self._pool.num_available - max(self._reservations.num_seats, needed)

    def to_reserve(self, request: Request, waiting: RequestQueue, step_tokens: int) -> tuple[list[int], int] | None:
        """Published blocks of its prefix, and the number of blocks for all tokens known and one more. None: not now.

        Those that wait to be computed here and came before it keep their room; they need not have begun. Those that
        catch up (``step_tokens`` in a step) keep what they came back with.
        """
        before = [other for other in waiting if other.order < request.order]
        if not self.has_seat(promised=len(before)):
            return None
        cached, lacking = self._blocks.match(request, request.num_tokens)
        if lacking and self._inflight.is_claimed(lacking[0]):
            return None
        num_blocks = self._blocks.blocks_for(request.num_tokens + 1)
        promised = sum(self._blocks.blocks_for(other.num_tokens + 1) for other in before)
        room = self.of_granted()
        if any(map(is_catching_up, self._running)):
            room = min(room, self.of_preempted(request, step_tokens))
        return None if self._blocks.cost(cached, num_blocks) > room - promised else (cached, num_blocks)
