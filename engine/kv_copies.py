"""Packing and unpacking of KV by the device itself, beside the steps: started by the host, never waited for by it.

Owns one stream and the small buffers of the copies that are on their way. Which blocks and which memory is the caller's
business. Started by the engine's thread only; ``KVCopy.wait`` is for any other.

    steps' stream    [ layers 0..7 ] [ layers 8..15 ] ...                          what is launched after join()
                          | mark()       | mark()                                    ^ join()
    copies' stream        '-> [ pack ]   '-> [ pack ] ...  [ unpack ] ---------------'

``mark()``: what is launched on the steps' stream so far, for a copy to come after. ``join()``: steps launched from now
on come after the copies started so far; whoever frees blocks that a copy may still touch calls it, so that nothing is
written into them before the copy is over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.kv_pack import DIGEST_SLOTS, copy_words, move_kv, words_of
from engine.wire_memory import WireMemory

_DESKS = 8
"""Copies on their way for which buffers are made at start; more are made when they are needed."""
_TABLE_BLOCKS = 4096


@dataclass(slots=True, eq=False)
class _Desk:
    """What one copy needs: the blocks' ids, and the parts of its digest, on the device and in pinned host memory."""

    table: torch.Tensor
    table_on_host: torch.Tensor
    ids: NDArray[np.int32]
    """``table_on_host`` again."""
    sums: torch.Tensor
    sums_on_host: torch.Tensor
    parts: NDArray[np.uint64]
    """``sums_on_host`` again."""
    done: torch.cuda.Event


class KVCopy:
    """A copy that was started."""

    def __init__(self, desk: _Desk, free: deque[_Desk], device: torch.device) -> None:
        self._desk = desk
        self._free = free
        self._device = device

    def wait(self) -> int:
        """Until it is over, without spinning; the block mix of the wire's bytes. Once, off the engine's thread."""
        torch.cuda.set_device(self._device)  # of this thread; else waiting would open a context on device 0
        self._desk.done.synchronize()
        mix = int(self._desk.parts.sum(dtype=np.uint64))
        self._free.append(self._desk)
        return mix


class KVCopies:
    @torch.inference_mode()
    def __init__(self, data: torch.Tensor) -> None:
        """``data``: the cache, [L, N, 2, K, S, D].

        Raises:
            ValueError: a head's row is no multiple of 8 bytes.
        """
        self._data = data
        self._words = words_of(data)
        self._device = data.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._free = deque(self._make_desk(_TABLE_BLOCKS) for _ in range(_DESKS))

    def warm_up(self) -> None:
        """Compile and load both kernels at start: else the first hand-off does it in the middle of a step. One token's
        row of block 0 goes out and back, so nothing changes."""
        row = torch.empty(2 * self._words.shape[3] * self._words.shape[5], dtype=torch.int64, device=self._device)
        wire = WireMemory(row.data_ptr(), row.nbytes)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self.pack([0], 0, 1, 0, 1, wire).wait()
        self.unpack([0], 0, 1, 0, 1, wire, self._data.dtype).wait()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @torch.inference_mode()
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
        """Start to copy this range to the wire, in the cache's dtype."""
        self._check_size(token_end - token_start, layer_end - layer_start, wire, self._data.dtype)
        desk, offset = self._desk_for(block_table, token_start, token_end)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._begin(desk)
            end = offset + token_end - token_start
            move_kv(self._words[layer_start:layer_end], desk.table, offset, end, wire, desk.sums, pack=True)
            return self._end(desk)

    @torch.inference_mode()
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
        """Start to copy the wire, of ``dtype``, into the blocks. Another dtype than the cache's: two passes more."""
        self._check_size(token_end - token_start, layer_end - layer_start, wire, dtype)
        desk, offset = self._desk_for(block_table, token_start, token_end)
        end = offset + token_end - token_start
        layers = self._words[layer_start:layer_end]
        with torch.cuda.stream(self._stream):
            self._begin(desk)
            if dtype == self._data.dtype:
                move_kv(layers, desk.table, offset, end, wire, desk.sums, pack=False)
            else:
                here = torch.empty(wire.num_bytes // 8, dtype=torch.int64, device=self._device)
                copy_words(wire, here, desk.sums)
                converted = here.view(dtype).to(self._data.dtype)
                unused = torch.zeros_like(desk.sums)
                move_kv(layers, desk.table, offset, end, converted.view(torch.int64), unused, pack=False)
            return self._end(desk)

    def _begin(self, desk: _Desk) -> None:
        desk.table.copy_(desk.table_on_host, non_blocking=True)
        desk.sums.zero_()

    def _end(self, desk: _Desk) -> KVCopy:
        desk.sums_on_host.copy_(desk.sums, non_blocking=True)
        desk.done.record()
        return KVCopy(desk, self._free, self._device)

    def _desk_for(self, block_table: Sequence[int], token_start: int, token_end: int) -> tuple[_Desk, int]:
        """Buffers with the ids of the blocks that these tokens are in; the first one's offset in its block."""
        size = self._data.shape[4]
        if not 0 <= token_start < token_end <= len(block_table) * size:
            raise ValueError(
                f"tokens {token_start}..{token_end} are not within the {len(block_table)} blocks of {size}"
            )
        first = token_start // size
        ids = block_table[first : -(-token_end // size)]
        desk = self._free.popleft() if self._free else self._make_desk(_TABLE_BLOCKS)
        if len(ids) > len(desk.table):
            desk = self._make_desk(1 << (len(ids) - 1).bit_length())
        desk.ids[: len(ids)] = ids
        return desk, token_start - first * size

    def _make_desk(self, table_blocks: int) -> _Desk:
        # From the copies' stream's own memory: what the steps' stream has freed may still be in use by its kernels.
        with torch.cuda.stream(self._stream):
            table = torch.empty(table_blocks, dtype=torch.int32, device=self._device)
            sums = torch.empty(DIGEST_SLOTS, dtype=torch.int64, device=self._device)
        table_on_host = torch.zeros(table_blocks, dtype=torch.int32, pin_memory=True)
        sums_on_host = torch.zeros(DIGEST_SLOTS, dtype=torch.int64, pin_memory=True)
        return _Desk(
            table,
            table_on_host,
            table_on_host.numpy(),
            sums,
            sums_on_host,
            sums_on_host.numpy().view(np.uint64),
            torch.cuda.Event(blocking=True),  # type: ignore[no-untyped-call]
        )

    def _check_size(self, num_tokens: int, num_layers: int, wire: WireMemory, dtype: torch.dtype) -> None:
        num_bytes = num_layers * 2 * self._data.shape[3] * num_tokens * self._data.shape[5] * dtype.itemsize
        if wire.num_bytes != num_bytes or num_bytes % 8:
            raise ValueError(f"the wire has {wire.num_bytes} bytes, {num_bytes} (a multiple of 8) are expected")
