"""KVCopies with interpreted kernels, without a GPU: which bytes go where, and their digest. Not its streams.

Run as a program with TRITON_INTERPRET=1 (test_triton_interpreter.py). Streams and events are played: what is launched
happens at once. The oracle is ``KVCache.pack`` and ``unpack`` on tensors, which copy block by block.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from engine import kv_copies
from engine.kv_cache import KVCache
from kv_transfer.block_mix import block_mix64

LAYERS, HEADS, DIM, TOKENS = 4, 2, 16, 47


class Event:
    def __init__(self, blocking: bool = False) -> None:
        self.is_recorded = False

    def record(self, stream: object = None) -> None:
        self.is_recorded = True

    def synchronize(self) -> None:
        assert self.is_recorded


class Stream:
    cuda_stream = 0

    def __init__(self, device: object = None) -> None:
        self.waited_for: list[object] = []

    def wait_event(self, event: Event) -> None:
        assert event.is_recorded
        self.waited_for.append(event)

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Calls:
    def copy(self, target: int, source: int, num_bytes: int, stream: Stream) -> None:
        ctypes.memmove(target, source, num_bytes)

    def record(self, event: Event, stream: Stream) -> None:
        event.record(stream)


class Wire:
    """A tensor that says what ``WireMemory`` does: as arguments the interpreter takes nothing but tensors."""

    def __init__(self, words: torch.Tensor) -> None:
        self.words = words
        self.address = words.data_ptr()
        self.num_bytes = words.nbytes


@contextlib.contextmanager
def played_device() -> Iterator[Stream]:
    steps = Stream()
    zeros = torch.zeros

    def host_zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*shape, **options)

    def words(wire: Any) -> Any:
        return wire.words if isinstance(wire, Wire) else wire

    copy = kv_copies.copy_words
    with (
        mock.patch.multiple(
            torch.cuda,
            Stream=Stream,
            Event=Event,
            stream=lambda stream: contextlib.nullcontext(),
            current_stream=lambda device=None: steps,
            set_device=lambda device: None,
        ),
        mock.patch.object(torch, "zeros", host_zeros),
        mock.patch.object(kv_copies, "CudaCalls", Calls),
        mock.patch.object(kv_copies, "copy_words", lambda w, *rest: copy(words(w), *rest)),
    ):
        yield steps


def make_cache(dtype: torch.dtype, block_size: int) -> tuple[KVCache, list[int]]:
    num_blocks = -(-TOKENS // block_size) + 3
    cache = KVCache(
        num_layers=LAYERS,
        num_blocks=num_blocks,
        num_kv_heads=HEADS,
        block_size=block_size,
        head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return cache, torch.randperm(num_blocks).tolist()[: -(-TOKENS // block_size)]


def check(sent: torch.dtype, kept: torch.dtype, blocks: tuple[int, int], tokens: tuple[int, int]) -> None:
    (p, p_table), (d, d_table) = make_cache(sent, blocks[0]), make_cache(kept, blocks[1])
    for layer in p.layers:
        layer.normal_()
    start, end = tokens
    part = (start, end, 1, 3)
    expected = torch.empty(p.packed_bytes(end - start, 2, sent), dtype=torch.uint8)
    p.pack(p_table, *part, expected, sent)
    wire = Wire(torch.zeros(expected.nbytes // 8, dtype=torch.int64))
    with played_device() as steps:
        sender, receiver = kv_copies.KVCopies(p._data), kv_copies.KVCopies(d._data)
        for _ in range(2 * kv_copies._DESKS):  # buffers are used again
            mark = sender.mark()
            copy = sender.pack(p_table, *part, wire, mark)  # type: ignore[arg-type]
            sender.start()
            mix = copy.wait()
            assert sender._streams[-1].waited_for[-1] is mark  # type: ignore[attr-defined]
            assert torch.equal(wire.words.view(torch.uint8), expected)
            assert mix == block_mix64(expected.numpy().tobytes())
            copy = receiver.unpack(d_table, *part, wire, sent)  # type: ignore[arg-type]
            receiver.start()
            assert copy.wait() == mix
        receiver.join()
        assert set(steps.waited_for) == set(receiver._streams)
        receiver.follow()
        assert [stream.waited_for[-1] for stream in receiver._streams] == [steps, steps]  # type: ignore[attr-defined]
        assert len(sender._free) == len(receiver._free) == kv_copies._DESKS
    other = KVCache(
        num_layers=LAYERS,
        num_blocks=d.num_blocks,
        num_kv_heads=HEADS,
        block_size=d.block_size,
        head_dim=DIM,
        dtype=kept,
        device=torch.device("cpu"),
    )
    other.unpack(d_table, *part, expected, sent)
    assert torch.equal(d._data, other._data)


def check_many(count: int) -> None:
    """Pieces of several requests, of all sizes, asked for at once: each goes where it belongs, with its own digest."""
    p, _ = make_cache(torch.bfloat16, 16)
    d, _ = make_cache(torch.bfloat16, 8)
    for layer in p.layers:
        layer.normal_()
    expected: list[tuple[torch.Tensor, Wire]] = []
    with played_device():
        sender, receiver = kv_copies.KVCopies(p._data), kv_copies.KVCopies(d._data)
        packs, unpacks = [], []
        for index in range(count):
            start = index % p.block_size
            part = (start, start + 1 + index % 9, index % 3, index % 3 + 1 + index % 2)
            table = torch.randperm(p.num_blocks).tolist()
            plain = torch.empty(p.packed_bytes(part[1] - part[0], part[3] - part[2], p.dtype), dtype=torch.uint8)
            p.pack(table, *part, plain, p.dtype)
            wire = Wire(torch.zeros(plain.nbytes // 8, dtype=torch.int64))
            expected.append((plain, wire))
            packs.append(sender.pack(table, *part, wire))  # type: ignore[arg-type]
        assert not expected[-1][1].words.any()
        sender.start()
        for copy, (plain, wire) in zip(packs, expected, strict=True):
            assert torch.equal(wire.words.view(torch.uint8), plain)
            assert copy.wait() == block_mix64(plain.numpy().tobytes())
        # A token of its own for each: nothing that one writes is another's.
        for index, (plain, wire) in enumerate(expected[:TOKENS]):
            words = Wire(wire.words[: receiver._words.shape[3] * receiver._words.shape[5] * 2].contiguous())
            unpacks.append(receiver.unpack(list(range(d.num_blocks)), index, index + 1, 2, 3, words, d.dtype))  # type: ignore[arg-type]
            expected[index] = (plain, words)
        receiver.start()
        for index, copy in enumerate(unpacks):
            words = expected[index][1]
            assert copy.wait() == block_mix64(words.words.numpy().tobytes())
            written = torch.zeros(words.num_bytes, dtype=torch.uint8)
            d.pack(list(range(d.num_blocks)), index, index + 1, 2, 3, written, d.dtype)
            assert torch.equal(written, words.words.view(torch.uint8))
        assert len(sender._free) >= kv_copies._DESKS
        assert len(receiver._free) >= kv_copies._DESKS


def check_order() -> None:
    """Blocks that a copy may still write are freed (``join``) and given to the next transfer, whose copy is launched on
    the other stream: it comes after the first one all the same."""
    cache, table = make_cache(torch.bfloat16, 16)
    with played_device():
        copies = kv_copies.KVCopies(cache._data)
        wire = Wire(torch.zeros(cache.packed_bytes(16, LAYERS, cache.dtype) // 8, dtype=torch.int64))
        for _ in range(3):
            copies.unpack(table, 0, 16, 0, LAYERS, wire, cache.dtype)  # type: ignore[arg-type]
            copies.join()
            first, other = copies._streams[-1], copies._streams[0]
            assert first is not other
            assert first in other.waited_for  # type: ignore[attr-defined]
            other.waited_for.clear()  # type: ignore[attr-defined]


if __name__ == "__main__":
    torch.manual_seed(0)
    check_order()
    check(torch.bfloat16, torch.bfloat16, (16, 8), (7, TOKENS))
    check(torch.float32, torch.bfloat16, (8, 16), (0, 33))
    check(torch.float16, torch.float32, (64, 16), (16, 17))
    check_many(40)
