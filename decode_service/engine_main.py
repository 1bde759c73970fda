"""The decode engine's process: builds the engine and the receiving side of hand-offs, and joins them.

The only module of this service that imports ``engine`` and ``kv_transfer``. Started by the service with one argument
(worker.launch). ``DecodeHandoff`` stands between three that do not know each other: the engine core (requests), the
receiver (transfers) and the process's loop (frames of the control streams).

    core --want_kv, request_ended--------------> DecodeHandoff --> Receiver <--segments-- data plane
    core <--reserve_kv, write_kv, kv_ready------ DecodeHandoff <-- Receiver <--frames---> control stream
"""

from __future__ import annotations

import sys
import time

import structlog
import torch

from engine.core import EngineCore
from engine.devices import config_for_device
from engine.host_kv import HostKV
from engine.kv_cache import KVCache
from engine.messages import EngineStats, ErrorCode, PeerFrame, ReceiveKV, TransferReport
from engine.process import Engine, EngineProcess
from engine.ready import engine_ready
from engine.request import Request
from engine.runners import build_runner
from engine.wire_memory import WireMemory
from kv_transfer.backends import load_all
from kv_transfer.backends.base import SegmentReceiver
from kv_transfer.copies import DeviceCopy
from kv_transfer.engine_staging import EngineStaging
from kv_transfer.layout import KVRange, make_layout, wire_of
from kv_transfer.protocol import Abort, Busy, Done, End, Frame, Open, Refused, Ticket
from kv_transfer.receiver import Receiver
from kv_transfer.staging import DeviceView, address_of
from kv_transfer.transfer import Moved, TransferKey
from pdserve.v1 import inference_pb2, kv_pb2, worker_pb2
from telemetry import logs
from worker.launch import EngineLaunch, decode_launch
from worker.translate import first_output_from_pb, is_first_output

log = structlog.get_logger()


class DecodeHandoff:
    """The core's ``HandoffReceiver``, the process's ``Handoff`` and the receiver's port."""

    def __init__(
        self,
        process: EngineProcess,
        core: EngineCore,
        kv_cache: KVCache,
        me: kv_pb2.WorkerIdentity,
        layout: kv_pb2.KVLayout,
        host: str,
        advertised_host: str,
        transfer: str,
        data_port: int = 0,
    ) -> None:
        self._process = process
        self._core = core
        self._copies = kv_cache.copies
        device = core.config.device
        self._staging = EngineStaging(device)
        backends: dict[str, tuple[SegmentReceiver, str]] = {}
        for name, backend in load_all(transfer, device, data_port).items():
            memory = backend.receiver_memory
            arena = None if memory is None else self._staging.arena(memory)
            receiver = backend.receiver(me, layout, arena, process.wakeup)
            backends[name] = (receiver, receiver.listen(host, advertised_host))
        self.endpoints = {name: endpoint for name, (_, endpoint) in backends.items()}
        self._receiver = Receiver(
            me,
            layout,
            self,
            backends,
            process.wakeup,
            time.monotonic,
            device_writes=self._copies is not None,
        )
        self._senders: dict[str, tuple[str, int]] = {}
        """Who asked on which control stream."""

    # ---- from the core

    def want_kv(self, request: Request) -> None:
        handoff = request.handoff
        assert isinstance(handoff, ReceiveKV)
        self._receiver.request_added(
            request.request_id,
            TransferKey(handoff.transfer_id, handoff.attempt),
            handoff.peer_id,
            handoff.peer_incarnation,
            request.num_tokens,
            request.deadline_s,
        )

    def attempt_ends(self, request: Request) -> None:
        self._receiver.keep_reservation(request.request_id)

    def request_ended(self, request: Request) -> None:
        self._free_after_unpacking()
        self._receiver.request_ended(request.request_id, f"the decode request ended: {request.finish_reason}")

    # ---- from the process's loop

    def on_frame(self, peer: str, payload: bytes) -> None:
        message = worker_pb2.HandoffFrame.FromString(payload)
        if message.HasField("open"):
            self._senders[peer] = (message.open.sender.worker_id, message.open.sender.incarnation)
        self._receiver.on_frame(peer, frame_from_pb(message))

    def on_peer_alive(self, peer: str) -> None:
        self._receiver.on_peer_alive(peer)

    def on_peer_lost(self, peer: str, reason: str) -> None:
        self._receiver.on_peer_lost(peer, reason)
        sender = self._senders.pop(peer, None)
        if sender is not None and sender not in self._senders.values():  # it has no newer stream
            self._receiver.drop_sender(*sender)

    def poll(self) -> None:
        self._receiver.poll()

    def next_deadline_s(self) -> float | None:
        return self._receiver.next_deadline_s

    def fill_stats(self, stats: EngineStats) -> None:
        counters = self._receiver.counters
        stats.transfers_started_total = counters.started
        stats.transfers_done_total = counters.done
        stats.transfers_failed_total = dict(counters.failed)
        stats.transfer_segments_total = counters.segments
        stats.transfer_bytes_total = counters.bytes
        stats.transfer_seconds_total = counters.seconds
        stats.segments_before_last_chunk_total = counters.streamed
        stats.staging_bytes = self._staging.used_bytes
        stats.staging_limit_bytes = self._staging.limit_bytes
        stats.leases = self._receiver.leases
        stats.tombstones = self._receiver.tombstones
        stats.parked_handoffs = self._receiver.parked

    # ---- from the receiver

    def send(self, peer: str, frame: Frame) -> None:
        self._process.send(PeerFrame(peer, frame_to_pb(frame).SerializeToString()))

    def reserve(self, request_id: str) -> int | None:
        return self._core.reserve_kv(request_id)

    def write_kv(
        self, request_id: str, part: KVRange, payload: memoryview | DeviceView, dtype: str
    ) -> DeviceCopy | None:
        wire = payload if self._copies is None else WireMemory(address_of(payload), len(payload))
        copy: DeviceCopy | None = self._core.write_kv(request_id, *part, wire, getattr(torch, dtype))
        return copy

    def start_copies(self) -> None:
        assert self._copies is not None
        self._copies.start()

    def publish(self, request_id: str, first_output: bytes, moved: Moved) -> None:
        self._ready(request_id, first_output, moved)

    def finish(self, request_id: str, first_output: bytes) -> None:
        self._free_after_unpacking()  # earlier segments may be on their way into blocks that are free now
        self._ready(request_id, first_output, None)

    def transfer_failed(self, request_id: str, reason: str, peer_lost: bool) -> None:
        self._free_after_unpacking()
        log.warning("handoff_failed", request_id=request_id, reason=reason)
        self._core.fail_request(request_id, ErrorCode.HANDOFF_FAILED, reason, True, peer_lost)

    def keep(self, request_id: str) -> bool:
        self._free_after_unpacking()  # the next attempt writes into the same blocks
        return self._core.keep_reservation(request_id)

    def take_over(self, request_id: str) -> bool:
        return self._core.take_over_reservation(request_id)

    def drop_kept(self, transfer_id: str) -> None:
        self._free_after_unpacking()
        self._core.drop_reservation(transfer_id)

    def release(self, request_id: str) -> None:
        self._free_after_unpacking()
        self._core.release_reservation(request_id)

    # ---- inside

    def _free_after_unpacking(self) -> None:
        """Blocks that are freed may be written by the next step: not before the unpacking that was started is over."""
        if self._copies is not None:
            self._copies.join()

    def _ready(self, request_id: str, first_output: bytes, moved: Moved | None) -> None:
        output = first_output_from_pb(inference_pb2.Output.FromString(first_output), request_id)
        timings = output.timings
        assert timings is not None
        transfer_s = 0.0
        if moved is not None:
            timings.transfer_s = transfer_s = moved.exposed_s
            timings.transfer = TransferReport(moved.lane, moved.total_s, moved.num_bytes, moved.cached_tokens)
        waited_s = time.monotonic() - self._core.scheduler.requests[request_id].arrival_s - transfer_s
        # Both workers got the request at the same time, so what P did not spend was spent on the way.
        timings.relay_s = max(0.0, waited_s - timings.prefill_queue_s - timings.handoff_wait_s - timings.prefill_s)
        output.sent_kv_tokens = moved.sent_tokens if moved is not None else 0
        self._core.kv_ready(request_id, output)


def frame_to_pb(frame: Frame) -> worker_pb2.HandoffFrame:
    """What a receiver says."""
    message = worker_pb2.HandoffFrame(transfer_id=frame.key.transfer_id, attempt=frame.key.attempt)
    match frame.body:
        case Ticket(epoch, cached_tokens, layout, backend, endpoint, lease_s, max_segment_bytes):
            message.ticket.CopyFrom(
                worker_pb2.Ticket(
                    epoch=epoch,
                    cached_tokens=cached_tokens,
                    layout=layout,
                    backend=backend,
                    endpoint=endpoint,
                    lease_s=lease_s,
                    max_segment_bytes=max_segment_bytes,
                )
            )
        case Busy(retry_after_s):
            message.busy.retry_after_s = retry_after_s
        case Refused(reason):
            message.refused.reason = reason
        case Done():
            message.done.SetInParent()
        case Abort(reason):
            message.abort.reason = reason
        case other:
            raise TypeError(f"a receiver does not say {type(other).__name__}")
    return message


def frame_from_pb(message: worker_pb2.HandoffFrame) -> Frame:
    """What a sender says. Anything else becomes an abort: the peer speaks another protocol."""
    key = TransferKey(message.transfer_id, message.attempt)
    match message.WhichOneof("body"):
        case "open":
            question = message.open
            return Frame(
                key,
                Open(
                    sender=question.sender,
                    layout=question.layout,
                    prompt_tokens=question.prompt_tokens,
                    timeout_s=question.timeout_s,
                    backends=tuple(question.backends),
                    no_kv=question.no_kv,
                    probes=dict(question.probes),
                ),
            )
        case "end":
            first_output = message.end.first_output
            if not is_first_output(first_output):
                return Frame(key, Abort("the sender's first output has no token"))
            return Frame(
                key,
                End(message.end.num_segments, first_output.SerializeToString(), first_output.HasField("finish")),
            )
        case "abort":
            return Frame(key, Abort(message.abort.reason))
        case other:
            return Frame(key, Abort(f"the sender sent {other!r}"))


def build(process: EngineProcess, launch: EngineLaunch) -> Engine:
    config = config_for_device(launch.engine_options, launch.role)
    runner = build_runner(config)
    copies = runner.kv_cache.copies
    left = None if copies is None else copies.follow
    host_memory = HostKV(runner.kv_cache, config.host_kv_bytes, left) if config.host_kv_bytes else None
    core = EngineCore(config, runner, host_memory=host_memory)
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
    handoff = DecodeHandoff(
        process,
        core,
        runner.kv_cache,
        launch.identity(),
        layout,
        launch.host,
        launch.advertised_host,
        launch.transfer,
        launch.data_port,
    )
    core.receiver = handoff
    ready.data_endpoints = handoff.endpoints
    return Engine(core, ready, handoff, hears_while_computing=launch.role == "decode")


def main() -> int:
    launch = decode_launch(sys.argv[1])
    logs.set_up("decode-engine", level=launch.log_level)
    process = EngineProcess(to_engine=launch.to_engine, from_engine=launch.from_engine, parent_pid=launch.parent_pid)
    return process.run(lambda process: build(process, launch))


if __name__ == "__main__":
    sys.exit(main())
