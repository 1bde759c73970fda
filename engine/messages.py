"""What crosses between a worker's service process and its engine process (ZeroMQ, msgpack), and nothing else.

Owns the message types; no behaviour. Torch-free, so that the service may import it.

    service                                   engine process
       |  AddRequest, AbortRequests, Drain,      |
       |  SendKVSnapshot                         |
       |  PeerFrame, PeerAlive, PeerLost ------> |   one step: schedule, run, update
       | <------ EngineReady (once)              |
       | <------ StepOutputs (one per step)      |   also every 0.5 s when idle: it is the engine's heartbeat
       | <------ PeerFrame                       |

Hand-off frames are opaque bytes here (protobuf HandoffFrame): the service relays them between the peer's control stream
and the engine process, which owns the memory, the leases and the epochs, and therefore decides.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a request ended; names as in inference.proto."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    TIMEOUT = "timeout"


class ErrorCode(StrEnum):
    """Typed cause of FinishReason.ERROR; names as in inference.proto, lower case."""

    INVALID_REQUEST = "invalid_request"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    PROMPT_TOO_LARGE = "prompt_too_large"
    OVERLOADED = "overloaded"
    WORKER_LOST = "worker_lost"
    HANDOFF_FAILED = "handoff_failed"
    INTERNAL = "internal"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the next token is drawn. Greedy when ``temperature`` is 0. Validated by :func:`validate`."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int | None = None
    """None: no logprobs; n: those of the drawn token and of the n most likely ones."""
    stop_token_ids: list[int] = []
    min_tokens: int = 0
    ignore_eos: bool = False

    @property
    def uses_history(self) -> bool:
        """Whether the values of the tokens drawn before change the next one's odds."""
        return self.repetition_penalty != 1.0 or bool(self.presence_penalty or self.frequency_penalty)


class SendKV(msgspec.Struct, frozen=True, tag="send_kv"):
    """This request's KV goes to a decode worker (gRPC address, identity); it stops after its first token."""

    transfer_id: str
    attempt: int
    peer_address: str
    peer_id: str
    peer_incarnation: int


class ReceiveKV(msgspec.Struct, frozen=True, tag="receive_kv"):
    """This request's KV comes from ``peer_id`` (a prefill worker)."""

    transfer_id: str
    attempt: int
    peer_id: str
    peer_incarnation: int


class AddRequest(msgspec.Struct, kw_only=True, omit_defaults=True, tag="add"):
    """A new request. ``output_token_ids`` were already given to the client: the request resumes after them."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    sampling: SamplingParams
    timeout_s: float
    cache_salt: str = ""
    priority: int = 0
    handoff: SendKV | ReceiveKV | None = None


class AbortRequests(msgspec.Struct, tag="abort"):
    """End these requests with FinishReason.ABORT. Unknown ids are ignored (they may have ended meanwhile)."""

    request_ids: list[str]
    reason: str = "client"
    is_retry: bool = False
    """Another attempt comes, maybe to the same worker: D keeps the reservation for it, for a moment."""


class PeerFrame(msgspec.Struct, tag="peer_frame"):
    """One hand-off frame from or to a peer worker. ``peer`` names the control stream (a key that the service made)."""

    peer: str
    payload: bytes


class PeerAlive(msgspec.Struct, tag="peer_alive"):
    """Something was heard from this peer: renew its leases."""

    peer: str


class PeerLost(msgspec.Struct, tag="peer_lost"):
    """The control stream to this peer is gone: end all its transfers."""

    peer: str
    reason: str = ""


class Drain(msgspec.Struct, tag="drain"):
    """Finish what has begun; what has not, and what comes, ends as aborted: its sender may have it done elsewhere."""


class SendKVSnapshot(msgspec.Struct, tag="kv_snapshot"):
    """Say again which blocks are cached: KVEvents that begin with BlocksCleared come soon."""


ToEngine = AddRequest | AbortRequests | PeerFrame | PeerAlive | PeerLost | Drain | SendKVSnapshot


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities at one output position (natural log, after penalties and bias, before temperature and cuts)."""

    logprob: float
    top_token_ids: list[int] = []
    top_logprobs: list[float] = []


class TransferReport(msgspec.Struct, frozen=True):
    """How a request's KV came."""

    lane: str
    """The transfer backend."""
    seconds: float
    """From the first segment until everything was verified."""
    num_bytes: int
    cached_tokens: int
    """Prompt tokens that were here already."""


class Timings(msgspec.Struct, omit_defaults=True):
    """Phases of the time to the first token, in seconds, each on one clock (inference.proto, Phases)."""

    prefill_queue_s: float = 0.0
    handoff_wait_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0
    relay_s: float = 0.0
    """Between the two workers of a hand-off: frames on their way."""
    transfer: TransferReport | None = None
    """D, after a hand-off."""


class RequestOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A request's news from one step. The last one, and only it, has a ``finish_reason``."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error_code: ErrorCode | None = None
    error_message: str = ""
    retryable: bool = False
    peer_lost: bool = False
    """The hand-off failed because of the other worker, as far as this one knows."""
    timings: Timings | None = None
    """With the first output that carries tokens."""
    cached_tokens: int | None = None
    """With ``timings``: prompt tokens taken from the prefix cache by the engine that prefilled."""
    sent_kv_tokens: int | None = None


class EngineStats(msgspec.Struct, omit_defaults=True):
    """Gauges (now) and counters (``*_total``: since the engine started). free + cached + used == total blocks."""

    running: int = 0
    waiting: int = 0
    waiting_for_kv: int = 0
    holding_kv: int = 0
    queued_tokens: int = 0
    shares_prefill: bool = False
    """It has an ITL budget, and room in it now: it may compute prompts while prefill workers are busy."""
    prefill_tokens_per_s: float = 0.0
    """Within the ITL budget, beside what decodes now; 0: not known yet."""
    itl_aim_s: float = 0.0
    """So long steps with decodes and prompt tokens are to take; 0: there is no ITL budget."""
    total_blocks: int = 0
    free_blocks: int = 0
    """Empty ones."""
    cached_blocks: int = 0
    """Unreferenced ones that hold a reusable prefix."""
    host_blocks: int = 0
    """Of KV that host memory holds for preempted requests, now."""
    total_host_blocks: int = 0
    steps_total: int = 0
    mixed_steps_total: int = 0
    """With an ITL budget: those with decodes and prompt tokens."""
    mixed_steps_over_budget_total: int = 0
    """That took longer than it."""
    max_batch_requests: int = 0
    """Most requests that one step ever ran."""
    prompt_tokens_total: int = 0
    generation_tokens_total: int = 0
    prefill_chunks_total: int = 0
    preemptions_total: int = 0
    offloaded_blocks_total: int = 0
    """To host memory."""
    offloaded_bytes_total: int = 0
    restored_blocks_total: int = 0
    """And back."""
    prefix_cache_queries_total: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits_total: int = 0
    """Prompt tokens found there."""
    reservations_taken_over_total: int = 0
    """D: attempts that went on with the blocks of the attempt before."""
    transfers_started_total: int = 0
    transfers_done_total: int = 0
    transfers_failed_total: dict[str, int] = {}
    """By reason."""
    transfer_segments_total: int = 0
    transfer_bytes_total: int = 0
    transfer_seconds_total: float = 0.0
    staging_bytes: int = 0
    """In use now."""
    staging_limit_bytes: int = 0
    leases: int = 0
    """Open reservations (D) or holds (P)."""
    tombstones: int = 0
    parked_handoffs: int = 0
    segments_before_last_chunk_total: int = 0
    """D: transfers whose first segment arrived before the prefill ended (streaming happened)."""


class BlocksStored(msgspec.Struct, omit_defaults=True, tag="stored"):
    """These blocks can be reused from now on. A chain after ``parent``, if that is not empty."""

    parent: bytes
    block_hashes: list[bytes]


class BlocksRemoved(msgspec.Struct, omit_defaults=True, tag="removed"):
    block_hashes: list[bytes]


class BlocksCleared(msgspec.Struct, omit_defaults=True, tag="cleared"):
    """No block is there."""


KVEvent = BlocksStored | BlocksRemoved | BlocksCleared


class KVEvents(msgspec.Struct):
    """Changes of the prefix cache, numbered without gaps from 1 in each incarnation of an engine (engine.kv_events)."""

    first_seq: int
    events: list[KVEvent]


class StepOutputs(msgspec.Struct, omit_defaults=True, tag="outputs"):
    """All news of one step."""

    outputs: list[RequestOutput] = []
    stats: EngineStats | None = None
    kv_events: KVEvents | None = None


class EngineReady(msgspec.Struct, kw_only=True, tag="ready"):
    """Sent once, when the engine can take requests. Values measured at start live here, not in the config."""

    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    hash_block_tokens: int
    num_blocks: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    kv_bytes: int
    eos_token_ids: list[int]
    kv_wire: str = ""
    """Version of the KV's format on the wire, and its digest: equal where KV may move."""
    data_endpoints: dict[str, str] = {}
    """Transfer backend -> address where this engine takes KV segments (decode)."""


class EngineFailed(msgspec.Struct, tag="failed"):
    """The engine cannot start or cannot go on; one line that names the remedy. It exits after this message."""

    message: str


FromEngine = EngineReady | EngineFailed | StepOutputs | PeerFrame
