"""The prefill engine's process: builds the engine and the sending side of hand-offs, and joins them.

The only module of this service that imports ``engine`` and ``kv_transfer``. Started by the service with one argument
(worker.launch). ``PrefillHandoff`` stands between three that do not know each other: the engine core (requests), the
sender (transfers) and the process's loop (frames of the control streams).

    core --want_ticket, kv_computed, prefill_ended--> PrefillHandoff --> Sender --segments--> data plane
    core <--grant_ticket, defer_ticket, release_kv--- PrefillHandoff <-- Sender <--frames---> control stream
"""

from __future__ import annotations

import sys
import time

import structlog
import torch

from engine.core import EngineCore
from engine.devices import config_for_device
from engine.kv_cache import KVCache
from engine.messages import EngineStats, ErrorCode, PeerFrame, RequestOutput, SendKV
from engine.process import Engine, EngineProcess
from engine.ready import engine_ready
from engine.request import Request
from engine.runners import build_runner
from engine.wire_memory import WireMemory
from kv_transfer.backends import load_all
from kv_transfer.copies import DeviceCopy
from kv_transfer.engine_staging import EngineStaging
from kv_transfer.layout import KVRange, cell_bytes, make_layout, wire_of
from kv_transfer.protocol import Abort, Busy, Done, End, Frame, Open, Refused, Ticket
from kv_transfer.sender import Sender
from kv_transfer.staging import DeviceView, address_of
from kv_transfer.transfer import TransferKey
from pdserve.v1 import inference_pb2, kv_pb2, worker_pb2
from telemetry import logs
from worker.launch import EngineLaunch, decode_launch
from worker.peer import Peer
from worker.translate import output_to_pb

log = structlog.get_logger()


class PrefillHandoff:
    """The core's ``HandoffSender``, the process's ``Handoff`` and the sender's port."""

    def __init__(
        self,
        process: EngineProcess,
        core: EngineCore,
        kv_cache: KVCache,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        transfer: str,
    ) -> None:
        self._process = process
        self._core = core
        self._kv_cache = kv_cache
        self._copies = kv_cache.copies
        self._dtype: torch.dtype = getattr(torch, layout.dtype)
        device = core.config.device
        staged_tokens = core.config.staged_steps * core.config.max_num_batched_tokens
        self._staging = EngineStaging(device, staged_tokens * layout.num_layers * cell_bytes(layout, layout.dtype))
        self._sender = Sender(
            me,
            layout,
            self,
            {
                name: backend.sender(self._staging.arena(backend.sender_memory))
                for name, backend in load_all(transfer, device).items()
            },
            process.wakeup,
            time.monotonic,
        )

    # ---- from the core

    def want_ticket(self, request: Request) -> None:
        handoff = request.handoff
        assert isinstance(handoff, SendKV)
        self._sender.want_ticket(
            request.request_id,
            key_of(handoff),
            peer_of(handoff),
            handoff.peer_incarnation,
            request.num_tokens,
            request.deadline_s,
            no_kv=request.sampling.max_tokens - request.num_output_so_far <= 1,
        )

    def kv_computed(self, request: Request, token_start: int, token_end: int, layer_start: int, layer_end: int) -> None:
        """On a device: its kernels that compute this are launched, and packing comes after them."""
        after = None if self._copies is None else self._copies.mark()
        self._sender.kv_computed(request.request_id, KVRange(token_start, token_end, layer_start, layer_end), after)

    def prefill_ended(self, request: Request, output: RequestOutput) -> None:
        first_output = output_to_pb(output, request.request_id).SerializeToString()
        self._sender.prefill_ended(request.request_id, first_output, finished=output.finish_reason is not None)

    def request_ended(self, request: Request) -> None:
        self._free_after_packing()
        handoff = request.handoff
        assert isinstance(handoff, SendKV)
        reason = f"the prefill request ended: {request.finish_reason}"
        self._sender.request_ended(request.request_id, key_of(handoff), peer_of(handoff), reason)

    # ---- from the process's loop

    def on_frame(self, peer: str, payload: bytes) -> None:
        self._sender.on_frame(peer, frame_from_pb(worker_pb2.HandoffFrame.FromString(payload)))

    def on_peer_alive(self, peer: str) -> None:
        self._sender.on_peer_alive(peer)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        self._sender.on_peer_lost(peer, reason)

    def poll(self) -> None:
        self._sender.poll()

    def next_deadline_s(self) -> float | None:
        return self._sender.next_deadline_s

    def fill_stats(self, stats: EngineStats) -> None:
        counters = self._sender.counters
        stats.transfers_started_total = counters.started
        stats.transfers_done_total = counters.done
        stats.transfers_failed_total = dict(counters.failed)
        stats.transfer_segments_total = counters.segments
        stats.transfer_bytes_total = counters.bytes
        stats.transfer_seconds_total = counters.seconds
        stats.staging_bytes = self._staging.used_bytes
        stats.staging_limit_bytes = self._staging.limit_bytes
        stats.leases = self._sender.leases

    # ---- from the sender

    def send(self, peer: str, frame: Frame) -> None:
        self._process.send(PeerFrame(peer, frame_to_pb(frame).SerializeToString()))

    def ticket_granted(self, request_id: str, cached_tokens: int) -> None:
        self._core.grant_ticket(request_id, cached_tokens)

    def ticket_deferred(self, request_id: str, retry_after_s: float) -> None:
        self._core.defer_ticket(request_id, retry_after_s)

    def pack(
        self, request_id: str, part: KVRange, out: memoryview | DeviceView, after: torch.cuda.Event | None
    ) -> DeviceCopy | None:
        request = self._core.scheduler.requests[request_id]
        if self._copies is not None:
            return self._copies.pack(request.block_table, *part, WireMemory(address_of(out), len(out)), after)
        assert isinstance(out, memoryview)
        self._kv_cache.pack(request.block_table, *part, torch.frombuffer(out, dtype=torch.uint8), self._dtype)
        return None

    def start_copies(self) -> None:
        assert self._copies is not None
        self._copies.start()

    def transfer_done(self, request_id: str) -> None:
        """The receiver has what was packed, or needs none of it."""
        self._free_after_packing()
        self._core.release_kv(request_id, None)

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        self._free_after_packing()
        log.warning("handoff_failed", request_id=request_id, reason=reason)
        self._core.release_kv(request_id, (ErrorCode.HANDOFF_FAILED, reason, True), peer_lost)

    # ---- inside

    def _free_after_packing(self) -> None:
        """Blocks that are freed may be written by the next step: not before the packing that was started read them."""
        if self._copies is not None:
            self._copies.join()


def key_of(handoff: SendKV) -> TransferKey:
    return TransferKey(handoff.transfer_id, handoff.attempt)


def peer_of(handoff: SendKV) -> str:
    return Peer(handoff.peer_id, handoff.peer_incarnation, handoff.peer_address).encode()


def frame_to_pb(frame: Frame) -> worker_pb2.HandoffFrame:
    """What a sender says."""
    message = worker_pb2.HandoffFrame(transfer_id=frame.key.transfer_id, attempt=frame.key.attempt)
    match frame.body:
        case Open(sender, layout, prompt_tokens, timeout_s, backends, no_kv, probes):
            message.open.CopyFrom(
                worker_pb2.Open(
                    sender=sender,
                    layout=layout,
                    prompt_tokens=prompt_tokens,
                    timeout_s=timeout_s,
                    backends=backends,
                    no_kv=no_kv,
                    probes=probes,
                )
            )
        case End(num_segments, first_output):
            output = inference_pb2.Output.FromString(first_output)
            message.end.CopyFrom(worker_pb2.EndOfPrefill(num_segments=num_segments, first_output=output))
        case Abort(reason):
            message.abort.reason = reason
        case other:
            raise TypeError(f"a sender does not say {type(other).__name__}")
    return message


def frame_from_pb(message: worker_pb2.HandoffFrame) -> Frame:
    """What a receiver says. Anything else becomes an abort: the peer speaks another protocol."""
    key = TransferKey(message.transfer_id, message.attempt)
    match message.WhichOneof("body"):
        case "ticket":
            ticket = message.ticket
            return Frame(
                key,
                Ticket(
                    epoch=ticket.epoch,
                    cached_tokens=ticket.cached_tokens,
                    layout=ticket.layout,
                    backend=ticket.backend,
                    endpoint=ticket.endpoint,
                    lease_s=ticket.lease_s,
                    max_segment_bytes=ticket.max_segment_bytes,
                ),
            )
        case "busy":
            return Frame(key, Busy(message.busy.retry_after_s))
        case "refused":
            return Frame(key, Refused(message.refused.reason))
        case "done":
            return Frame(key, Done())
        case "abort":
            return Frame(key, Abort(message.abort.reason))
        case other:
            return Frame(key, Abort(f"the receiver sent {other!r}"))


def build(process: EngineProcess, launch: EngineLaunch) -> Engine:
    config = config_for_device(launch.engine_options, launch.role)
    runner = build_runner(config)
    core = EngineCore(config, runner)
    ready = engine_ready(config, runner)
    layout = make_layout(
        model_fingerprint=ready.model_fingerprint,
        num_layers=ready.num_layers,
        num_kv_heads=ready.num_kv_heads,
        head_dim=ready.head_dim,
        hash_block_tokens=ready.hash_block_tokens,
        block_size=ready.block_size,
        dtype=ready.kv_dtype,
    )
    ready.kv_wire = wire_of(layout)
    handoff = PrefillHandoff(process, core, runner.kv_cache, launch.identity(), layout, launch.transfer)
    core.sender = handoff
    return Engine(core, ready, handoff)


def main() -> int:
    launch = decode_launch(sys.argv[1])
    logs.set_up("prefill-engine", level=launch.log_level)
    process = EngineProcess(to_engine=launch.to_engine, from_engine=launch.from_engine, parent_pid=launch.parent_pid)
    return process.run(lambda process: build(process, launch))


if __name__ == "__main__":
    sys.exit(main())
