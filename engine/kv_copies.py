"""Packing and unpacking of KV by the device itself, beside the steps: started by the host, never waited for by it.

Owns two streams and the small buffers of the copies that are on their way. Which blocks and which memory is the
caller's business. Used by the engine's thread only; ``KVCopy.wait`` is for any other.

    pack() pack() pack() start()      one upload, one kernel and one event for all that was asked for since the last one

    steps' stream    [ layers 0..7 ] [ layers 8..15 ] ...                          what is launched after join()
                          | mark()       | mark()                                    ^ join()
    copies' streams       '-> [ pack ]   '-> [ pack ] ...  [ unpack ] ---------------'

The two take turns, so that one launch begins where the one before it no longer fills the device.

``mark()``: what is launched on the steps' stream so far, for a copy to come after. ``join()``: what is launched from
now on, steps and copies, comes after the copies asked for so far; whoever frees blocks that a copy may still touch
calls it, so that nothing is written into them before that is over: neither by a step nor on the other stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.cuda_calls import CudaCalls
from engine.kernels.kv_pack import JOB_FIELDS, ROW_WORDS, WIRE_ALIGNMENT, Job, copy_words, move_kv, words_of
from engine.wire_memory import WireMemory

_MAX_JOBS = 16
_IDS = 1024
"""Of blocks, for which a desk has room; larger ones are made when they are needed."""
_DESKS = 16
"""Made at start; more are made when they are needed."""
_MASK = 0xFFFFFFFFFFFFFFFF


@dataclass(slots=True, eq=False)
class _Desk:
    """What the copies of one launch need: jobs and block ids in one piece, and their digests."""

    words_on_host: torch.Tensor
    """Pinned, as the digests are; the kernel writes these there."""
    host_jobs: NDArray[np.int64]
    host_ids: NDArray[np.int32]
    words: torch.Tensor
    jobs: torch.Tensor
    ids: torch.Tensor
    rows: torch.Tensor
    mixes: torch.Tensor
    host_mixes: NDArray[np.int64]
    done: torch.cuda.Event
    num_bytes: int
    """Of ``words``."""
    is_over: bool = False
    num_unread: int = 0


@dataclass(slots=True, eq=False)
class _Batch:
    """Copies that were asked for and not started."""

    desk: _Desk
    packs: bool
    after: list[torch.cuda.Event]
    num_jobs: int = 0
    num_ids: int = 0
    num_planes: int = 0
    num_tokens: int = 0


class KVCopy:
    """A copy that was asked for. It may be waited for once it is started."""

    def __init__(self, desk: _Desk, index: int, free: deque[_Desk], device: torch.device) -> None:
        self._desk = desk
        self._index = index
        self._free = free
        self._device = device

    def wait(self) -> int:
        """Until it is over, without spinning; the block mix of the wire's bytes. Once, on one thread for all copies."""
        desk = self._desk
        if not desk.is_over:
            torch.cuda.set_device(self._device)  # of this thread; else waiting would open a context on device 0
            desk.done.synchronize()
            desk.is_over = True
        mix = int(desk.host_mixes[self._index]) & _MASK
        desk.num_unread -= 1
        if not desk.num_unread:
            self._free.append(desk)
        return mix


class KVCopies:
    def __init__(self, data: torch.Tensor) -> None:
        """``data``: the cache, [L, N, 2, K, S, D].

        Raises:
            ValueError: a head's row is no multiple of 8 bytes.
        """
        self._data = data
        self._words = words_of(data)
        self._dtype = data.dtype
        self._num_heads, self._block_size, self._head_dim = data.shape[3:]
        self._device = data.device
        self._calls = CudaCalls()
        self._streams = [torch.cuda.Stream(self._device) for _ in range(2)]  # type: ignore[no-untyped-call]
        self._free = deque(self._make_desk(_IDS) for _ in range(_DESKS))
        self._batch: _Batch | None = None

    def warm_up(self) -> None:
        """Compile and load both kernels at start: else the first hand-off does it in the middle of a step. One token's
        row of block 0 goes out and back, so nothing changes."""
        row = torch.empty(2 * self._words.shape[3] * self._words.shape[5], dtype=torch.int64, device=self._device)
        wire = WireMemory(row.data_ptr(), row.nbytes)
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        for copy in (self.pack([0], 0, 1, 0, 1, wire), self.unpack([0], 0, 1, 0, 1, wire, self._dtype)):
            self.start()
            copy.wait()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self) -> None:
        self.start()
        for stream in self._streams:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        one, other = self._streams
        one.wait_stream(other)
        other.wait_stream(one)

    def follow(self) -> None:
        """What is asked for from now on comes after all that is launched on the steps' stream so far: whoever frees
        blocks that are still read there calls it."""
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self._device))

    def pack(
        self,
        block_table: Sequence[int],
        token_start: int,
        token_end: int,
        layer_start: int,
        layer_end: int,
        wire: WireMemory,
        after: torch.cuda.Event | None = None,
    ) -> KVCopy:
        """Ask for a copy of this range to the wire, in the cache's dtype."""
        self._check(block_table, token_start, token_end, layer_end - layer_start, wire, self._dtype)
        copy = self._add(block_table, token_start, token_end, layer_start, layer_end, wire.address, packs=True)
        batch = self._batch
        if after is not None and batch is not None and (not batch.after or batch.after[-1] is not after):
            batch.after.append(after)
        return copy

    def unpack(
        self,
        block_table: Sequence[int],
        token_start: int,
        token_end: int,
        layer_start: int,
        layer_end: int,
        wire: WireMemory,
        dtype: torch.dtype,
    ) -> KVCopy:
        """Ask for a copy of the wire, of ``dtype``, into the blocks. Another dtype than the cache's: two passes more,
        which are started here."""
        self._check(block_table, token_start, token_end, layer_end - layer_start, wire, dtype)
        part = (block_table, token_start, token_end, layer_start, layer_end)
        if dtype == self._dtype:
            return self._add(*part, wire.address, packs=False)
        self.start()
        with torch.cuda.stream(self._streams[0]):
            here = torch.empty(wire.num_bytes // 8, dtype=torch.int64, device=self._device)
            converted = torch.empty_like(here.view(dtype), dtype=self._dtype)
            self._add(*part, converted.data_ptr(), packs=False)
            assert self._batch is not None
            desk = self._batch.desk
            copy_words(wire, here, desk.rows[1], desk.mixes[1:])
            converted.copy_(here.view(dtype))
        self.start()
        return KVCopy(desk, 1, self._free, self._device)

    def start(self) -> None:
        """Launch what was asked for."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        desk = batch.desk
        desk.is_over = False
        desk.num_unread = batch.num_jobs  # of a converted one: the wire's own, instead of the job's
        stream = self._streams[0]
        self._streams.reverse()
        with torch.cuda.stream(stream):
            for event in batch.after:
                stream.wait_event(event)
            self._calls.copy(desk.words.data_ptr(), desk.words_on_host.data_ptr(), desk.num_bytes, stream)
            move_kv(
                self._words, desk.jobs, desk.ids, desk.rows, desk.mixes,
                batch.num_jobs, batch.num_planes, batch.num_tokens, pack=batch.packs,
            )  # fmt: skip
            self._calls.record(desk.done, stream)

    def _add(
        self,
        block_table: Sequence[int],
        token_start: int,
        token_end: int,
        layer_start: int,
        layer_end: int,
        address: int,
        *,
        packs: bool,
    ) -> KVCopy:
        size, planes_a_layer = self._block_size, 2 * self._num_heads
        first = token_start // size
        ids = block_table[first : -(-token_end // size)]
        batch = self._batch
        if batch is None or not self._fits(batch, len(ids), packs):
            self.start()
            batch = self._batch = _Batch(self._desk_for(len(ids)), packs, [])
        num_planes, num_tokens = (layer_end - layer_start) * planes_a_layer, token_end - token_start
        job = Job(
            address, num_planes, layer_start * planes_a_layer, num_tokens, token_start - first * size, batch.num_ids
        )
        desk, index = batch.desk, batch.num_jobs
        desk.host_jobs[index] = job
        desk.host_ids[batch.num_ids : batch.num_ids + len(ids)] = ids
        batch.num_jobs += 1
        batch.num_ids += len(ids)
        batch.num_planes = max(batch.num_planes, num_planes)
        batch.num_tokens = max(batch.num_tokens, num_tokens)
        return KVCopy(desk, index, self._free, self._device)

    @staticmethod
    def _fits(batch: _Batch, num_ids: int, packs: bool) -> bool:
        return (
            batch.packs == packs and batch.num_jobs < _MAX_JOBS and batch.num_ids + num_ids <= len(batch.desk.host_ids)
        )

    def _desk_for(self, num_ids: int) -> _Desk:
        desk = self._free.popleft() if self._free else self._make_desk(_IDS)
        return desk if num_ids <= len(desk.host_ids) else self._make_desk(1 << (num_ids - 1).bit_length())

    def _make_desk(self, num_ids: int) -> _Desk:
        num_job_words = _MAX_JOBS * JOB_FIELDS
        num_words = num_job_words + num_ids // 2
        # From a copies' stream's own memory: what the steps' stream has freed may still be in use by its kernels.
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._streams[0]):
            words = torch.empty(num_words, dtype=torch.int64, device=self._device)
            rows = torch.zeros(_MAX_JOBS, ROW_WORDS, dtype=torch.int64, device=self._device)
            done.record()
        self._streams[1].wait_event(done)
        words_on_host = torch.zeros(num_words, dtype=torch.int64, pin_memory=True)
        mixes = torch.zeros(_MAX_JOBS, dtype=torch.int64, pin_memory=True)
        on_host = words_on_host.numpy()
        return _Desk(
            words_on_host,
            on_host[:num_job_words].reshape(_MAX_JOBS, JOB_FIELDS),
            on_host[num_job_words:].view(np.int32),
            words,
            words[:num_job_words].view(_MAX_JOBS, JOB_FIELDS),
            words[num_job_words:].view(torch.int32),
            rows,
            mixes,
            mixes.numpy(),
            done,
            words.nbytes,
        )

    def _check(
        self,
        block_table: Sequence[int],
        token_start: int,
        token_end: int,
        num_layers: int,
        wire: WireMemory,
        dtype: torch.dtype,
    ) -> None:
        if not 0 <= token_start < token_end <= len(block_table) * self._block_size:
            raise ValueError(
                f"tokens {token_start}..{token_end} are not within the {len(block_table)} blocks of {self._block_size}"
            )
        num_bytes = num_layers * 2 * self._num_heads * (token_end - token_start) * self._head_dim * dtype.itemsize
        if wire.num_bytes != num_bytes or num_bytes % 8:
            raise ValueError(f"the wire has {wire.num_bytes} bytes, {num_bytes} (a multiple of 8) are expected")
        if wire.address % WIRE_ALIGNMENT:
            raise ValueError(f"packed KV at {wire.address:#x}: no multiple of {WIRE_ALIGNMENT}")
