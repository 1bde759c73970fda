"""One try of a request on one pair of workers: what is sent to whom, and what is counted for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pdserve.session import Handle, OutputBuffer
from pdserve.v1 import inference_pb2 as pb
from router.breaker import WorkerKey
from router.placement import Placement, worker_key
from router.workers import Worker

MIN_LEARNED_TOKENS = 64


@dataclass(slots=True)
class Charge:
    """What a worker is counted for: once up, once down."""

    worker: Worker
    requests: int
    tokens: int
    """To be computed there."""
    kv_tokens: int

    def __post_init__(self) -> None:
        if self.tokens and not self.worker.load.own_queued_tokens:
            self.worker.pace.began(asyncio.get_running_loop().time())
        self.worker.load.add(self.requests, self.tokens, self.kv_tokens)

    def computed(self) -> None:
        """They do not wait any more."""
        if self.tokens:
            self.worker.pace.computed(self.tokens, asyncio.get_running_loop().time())
        self.drop_tokens()

    def drop_tokens(self) -> None:
        self.worker.load.add(0, -self.tokens, 0)
        self.tokens = 0

    def drop(self) -> None:
        self.drop_tokens()
        self.worker.load.add(-self.requests, 0, -self.kv_tokens)
        self.requests = self.kv_tokens = 0


class Attempt:
    """Sends the request to both workers at once; their outputs meet in one buffer. End it exactly once."""

    def __init__(self, placement: Placement, request: pb.GenerateRequest, transfer_id: str, number: int) -> None:
        """``request``: as it is to be computed (output so far, time left); it is copied, not kept."""
        self.decode = placement.decode
        self.prefill = placement.prefill
        self.number = number
        self.keys: dict[str, WorkerKey] = {
            worker.worker_id: worker_key(worker) for worker in (self.decode, self.prefill) if worker is not None
        }
        """By worker id: the incarnations that it was sent to; the workers may have newer ones when it ends."""
        self.model_fingerprint = placement.decode.record.fingerprint
        self.has_tokens = False
        """The decode worker has emitted in this attempt: the hand-off is behind it."""
        self._transfer_id = transfer_id
        self._buffer = OutputBuffer()
        self._ended = False
        num_tokens = self._num_tokens = len(request.prompt_token_ids) + len(request.output_so_far)
        self._is_alone = (self.prefill or self.decode).load.requests == 0
        uncached = num_tokens - placement.prefill_cached_tokens
        # The decode worker first: a hand-off that it does not know yet would have to wait there.
        self.decode_handle = self._open(self.decode, self.prefill, pb.Handoff.SIDE_RECEIVE, request)
        self._decode_charge = Charge(self.decode, 1, uncached if self.prefill is None else 0, num_tokens)
        self.prefill_handle: Handle | None = None
        self._prefill_charge: Charge | None = None
        if self.prefill is not None:
            self.prefill_handle = self._open(self.prefill, self.decode, pb.Handoff.SIDE_SEND, request)
            self._prefill_charge = Charge(self.prefill, 1, uncached, num_tokens)

    async def next_output(self) -> tuple[Worker, pb.Output]:
        """What either worker says next, oldest first."""
        handle, output = await self._buffer.get()
        if handle is self.prefill_handle and self.prefill is not None:
            if output.HasField("finish") and self._prefill_charge is not None:
                if output.finish.reason in (pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH):
                    self._prefill_charge.computed()
                self._prefill_charge.drop()
            return self.prefill, output
        if output.token_ids:
            if not self.has_tokens:
                self._learn(output)
            self._prefill_is_over()
        return self.decode, output

    def end(self, abort_reason: str | None) -> None:
        """Stop counting it. ``abort_reason``: and end it on the workers, too; None: it ended well.

        After a good end the prefill worker may still be waiting for the last word of its hand-off: it ends by itself.
        """
        if self._ended:
            return
        self._ended = True
        for charge in (self._decode_charge, self._prefill_charge):
            if charge is not None:
                charge.drop()
        if abort_reason is not None:
            for handle in (self.decode_handle, self.prefill_handle):
                if handle is not None:
                    handle.abort(abort_reason)

    def _learn(self, output: pb.Output) -> None:
        """What the workers say of this request's way to its first token says how fast they are."""
        charge = self._prefill_charge or self._decode_charge
        prefiller = charge.worker.load
        computed = self._num_tokens - output.cached_tokens
        # Beside others it would say how busy they are, and a short prompt, how long a step takes at least.
        # The prefill worker may have said already that it is done with this one.
        if self._is_alone and prefiller.own_requests == charge.requests and computed >= MIN_LEARNED_TOKENS:
            prefiller.prefill.observe(computed, output.phases.prefill_s)
        if self.prefill is not None:
            self.decode.load.exposed.observe(output.sent_kv_tokens, output.phases.transfer_s)

    def _prefill_is_over(self) -> None:
        """The first token is there: the queues are free of this prompt, though a report may still say otherwise."""
        self.has_tokens = True
        self._decode_charge.computed()
        if self._prefill_charge is not None:
            self._prefill_charge.computed()

    def _open(
        self, worker: Worker, peer: Worker | None, side: pb.Handoff.Side.ValueType, request: pb.GenerateRequest
    ) -> Handle:
        copy = pb.GenerateRequest()
        copy.CopyFrom(request)
        copy.request_id = f"{self._transfer_id}/{self.number}"
        if peer is not None:
            copy.handoff.side = side
            copy.handoff.transfer_id = self._transfer_id
            copy.handoff.attempt = self.number
            copy.handoff.peer.CopyFrom(peer.identity)
        return worker.session.open(copy, buffer=self._buffer)
