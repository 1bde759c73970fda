"""One try of a request on one pair of workers: what is sent to whom, and what is counted for it."""

from __future__ import annotations

from pdserve.session import Handle, OutputBuffer
from pdserve.v1 import inference_pb2 as pb
from router.placement import Placement, WorkerKey, worker_key
from router.workers import Worker


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
        self.has_tokens = False
        """The decode worker has emitted in this attempt: the hand-off is behind it."""
        self._transfer_id = transfer_id
        self._num_tokens = len(request.prompt_token_ids) + len(request.output_so_far)
        self._buffer = OutputBuffer()
        self._ended = False
        # The decode worker first: a hand-off that it does not know yet would have to wait there.
        self.decode_handle = self._open(self.decode, self.prefill, pb.Handoff.SIDE_RECEIVE, request)
        self.prefill_handle = (
            self._open(self.prefill, self.decode, pb.Handoff.SIDE_SEND, request) if self.prefill is not None else None
        )

    async def next_output(self) -> tuple[Worker, pb.Output]:
        """What either worker says next, oldest first."""
        handle, output = await self._buffer.get()
        if handle is self.prefill_handle and self.prefill is not None:
            return self.prefill, output
        return self.decode, output

    def end(self, abort_reason: str | None) -> None:
        """Stop counting it. ``abort_reason``: and end it on the workers, too; None: it ended well.

        After a good end the prefill worker may still be waiting for the last word of its hand-off: it ends by itself.
        """
        if self._ended:
            return
        self._ended = True
        for worker, handle in ((self.decode, self.decode_handle), (self.prefill, self.prefill_handle)):
            if worker is None or handle is None:
                continue
            worker.outstanding_requests -= 1
            worker.outstanding_tokens -= self._num_tokens
            if abort_reason is not None:
                handle.abort(abort_reason)

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
        worker.outstanding_requests += 1
        worker.outstanding_tokens += self._num_tokens
        return worker.session.open(copy, buffer=self._buffer)
