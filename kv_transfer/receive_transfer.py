"""One transfer as its receiver sees it: what was promised, what has come, and what a segment must be to belong to it.

State only; receiver.py decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kv_transfer.backends.base import Origin
from kv_transfer.layout import DTYPE_BYTES, KVRange, cell_bytes, mismatch
from kv_transfer.lease import Lease
from kv_transfer.protocol import End, Open, Ticket
from kv_transfer.transfer import TransferKey, TransferState, check_edge
from pdserve.v1 import kv_pb2


@dataclass(slots=True, eq=False)
class ReceiveTransfer:
    request_id: str
    key: TransferKey
    sender_id: str
    sender_incarnation: int
    prompt_tokens: int
    deadline_s: float
    state: TransferState = TransferState.HANDSHAKING
    peer: str | None = None
    """The control stream that asked; None before."""
    busy_since_s: float | None = None
    """First told to come again; None: it has a ticket, or has not asked."""
    asked_s: float = 0.0
    lease: Lease | None = None
    ticket: Ticket | None = None
    took_over: bool = False
    """It holds an earlier attempt's reservation under its lease, and nobody has asked for a ticket yet."""
    no_kv: bool = False
    origin: Origin | None = None
    """The channel over which its segments come; None: none has come yet."""
    parts: dict[int, KVRange] = field(default_factory=dict)
    """Segments that were taken, by index."""
    verified: int = 0
    """How many of them are written and checked."""
    cells: int = 0
    """Of those."""
    num_bytes: int = 0
    first_segment_s: float | None = None
    last_segment_s: float = 0.0
    end: End | None = None
    end_s: float = 0.0

    def move(self, state: TransferState) -> None:
        check_edge(self.key, self.state, state)
        self.state = state

    @property
    def is_open(self) -> bool:
        return self.state in (TransferState.READY, TransferState.TRANSFERRING)

    def question_problem(
        self, question: Open, layout: kv_pb2.KVLayout, reachable: list[str], unreachable: list[str]
    ) -> str | None:
        """``reachable``: backends that reach the sender; ``unreachable``: why the others do not.

        None when this is the sender that the request expects, and its KV can be taken; else both values.
        """
        asked = (question.sender.worker_id, question.sender.incarnation)
        if asked != (self.sender_id, self.sender_incarnation):
            return f"sender: expected {self.sender_id}/{self.sender_incarnation}, asked by {asked[0]}/{asked[1]}"
        if question.prompt_tokens != self.prompt_tokens:
            return f"prompt: {self.prompt_tokens} tokens here, {question.prompt_tokens} at the sender"
        if not reachable:
            theirs = ", ".join(question.backends)
            return f"no transfer backend reaches the sender, which has {theirs} ({'; '.join(unreachable)})"
        return mismatch(layout, question.layout)

    def cells_needed(self, layout: kv_pb2.KVLayout) -> int:
        """What the ticket leaves to the sender; nothing before there is one."""
        return 0 if self.ticket is None else (self.prompt_tokens - self.ticket.cached_tokens) * layout.num_layers

    def cells_missing(self, layout: kv_pb2.KVLayout) -> int:
        """Of those that the ticket asks for; what has come is not missing, verified or not."""
        return self.cells_needed(layout) - sum(part.cells for part in self.parts.values())

    def owns(self, header: kv_pb2.SegmentHeader, sender: kv_pb2.WorkerIdentity) -> bool:
        """This segment was sent for this very reservation, by the incarnation that it was given to."""
        return (
            self.is_open
            and self.ticket is not None
            and header.epoch == self.ticket.epoch
            and header.sender_incarnation == self.sender_incarnation == sender.incarnation
            and sender.worker_id == self.sender_id
        )

    def range_problem(self, header: kv_pb2.SegmentHeader, part: KVRange, layout: kv_pb2.KVLayout) -> str | None:
        """None when the segment holds a part of what the ticket asks for that has not come yet."""
        if header.dtype not in DTYPE_BYTES:
            return f"dtype {header.dtype!r} is not one of {', '.join(DTYPE_BYTES)}"
        cached_tokens = 0 if self.ticket is None else self.ticket.cached_tokens
        if not (
            cached_tokens <= part.token_start < part.token_end <= self.prompt_tokens
            and part.layer_start < part.layer_end <= layout.num_layers
        ):
            return f"{part} is outside of what the ticket asks for"
        size = part.cells * cell_bytes(layout, header.dtype)
        if header.payload_bytes != size:
            return f"{header.payload_bytes} bytes where {part} has {size}"
        if any(part.overlaps(other) for other in self.parts.values()):
            return f"{part} overlaps another segment"
        return None
