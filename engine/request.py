"""One request inside the engine: its tokens, its state, its blocks.

Owns the states and the table of allowed edges. Not the queues (scheduler) and not the blocks' reference counts (block
pool). Made by ``EngineCore.add``, read by the scheduler, the model runner and the hand-off.

    add --> WAITING ----------> RUNNING <----> PREEMPTED          aggregated, or D prefilling by itself
    add --> WAITING ----------> RUNNING --> HOLDING_KV            P: blocks are kept until the hand-off ended
    add --> WAITING_FOR_KV ---> RUNNING <----> PREEMPTED          D: blocks are reserved, then the KV arrives
    every state --> FINISHED    (``finish_reason`` says why)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from engine.messages import FinishReason, ReceiveKV, RequestOutput, SamplingParams, SendKV


class RequestStatus(Enum):
    """Where a request is in its life; why it ended is ``Request.finish_reason``."""

    WAITING = auto()
    WAITING_FOR_KV = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    HOLDING_KV = auto()
    FINISHED = auto()


EDGES: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.WAITING_FOR_KV: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.HOLDING_KV, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.HOLDING_KV: frozenset({RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """Compared by identity. Only the engine's own thread touches it."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    """Those given at ``add`` (a resumed request) first; the next token's output position is the length."""
    sampling: SamplingParams
    arrival_s: float
    """time.monotonic, as every ``_s`` field here that is a moment."""
    deadline_s: float
    arrival_index: int = 0
    """Unique in an engine."""
    priority: int = 0
    cache_salt: str = ""
    handoff: SendKV | ReceiveKV | None = None

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    """Tokens whose KV is in ``block_table``; chases ``num_tokens``."""
    block_table: list[int] = field(default_factory=list)
    """Append-only while the request holds blocks."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Of the full blocks, as far as they were needed yet."""

    order: tuple[int, int] = field(init=False)
    """(priority, arrival_index): smaller runs earlier and is preempted later."""
    num_output_so_far: int = field(init=False)
    """Output tokens given at ``add``: not billed and not emitted again."""
    all_token_ids: list[int] = field(init=False)
    """Prompt and output."""
    num_prefill_tokens: int = field(init=False)
    """Tokens known when it was last admitted: computing these is prefill, the later ones are decode."""
    num_cached_tokens: int | None = None
    """Taken from the prefix cache at the first admission; None before."""
    num_remote_cached_tokens: int = 0
    """P: tokens that the receiver has already, as its ticket says."""
    has_ticket: bool = False
    """P: the receiver reserved room; the request may run."""
    was_preempted: bool = False
    host_slots: list[int] = field(default_factory=list)
    """PREEMPTED: where its KV waits in host memory, block by block."""
    num_host_tokens: int = 0
    """How many tokens that is the KV of."""
    first_output: RequestOutput | None = None
    """P: what ended the prefill, kept until the hand-off ends."""

    num_pending_tokens: int = 0
    """Drawn by steps in flight, so not known here yet: at most one when a step is scheduled."""
    last_step: int = 0
    """The newest step that was launched with it."""

    waits_since_s: float = field(init=False)
    """To be computed: since it came, or was preempted."""
    ticket_asked_s: float | None = None
    handoff_wait_s: float = 0.0
    first_scheduled_s: float | None = None

    def __post_init__(self) -> None:
        self.order = (self.priority, self.arrival_index)
        self.waits_since_s = self.arrival_s
        self.num_output_so_far = len(self.output_token_ids)
        self.all_token_ids = self.prompt_token_ids + self.output_token_ids
        self.num_prefill_tokens = len(self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def sends_kv(self) -> bool:
        """P's side of a hand-off: it stops after one token and is never preempted."""
        return type(self.handoff) is SendKV

    def append_token(self, token_id: int) -> None:
        self.output_token_ids.append(token_id)
        self.all_token_ids.append(token_id)

    def transition(self, to: RequestStatus) -> None:
        """Raises ValueError on an edge that is not in ``EDGES``."""
        if to not in EDGES[self.status]:
            raise ValueError(f"request {self.request_id}: {self.status.name} -> {to.name} is not an allowed edge")
        self.status = to
