"""A CUDA device, played on the host: what is launched happens at once, and who touches what when is checked.

Streams, events and the host have vector clocks. Two accesses to one place, of which one at least writes, have to be in
an order that streams, events or a wait of the host make: not by luck, as on a device that happens to be fast. So one
run finds what any timing could bring about. ``Race`` says who and where.

    steps' stream   a step, layer by layer, over a real KVCache (PlayedRunner); copies to and from host memory
    copies' streams ``engine.kv_copies.KVCopies`` itself, with its two kernels written in numpy
    the host        knows what it waited for, and what it asked for and heard was over
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch

from engine import kv_copies
from engine.batch import SampledBatch, ScheduledBatch
from engine.config import EngineConfig
from engine.host_kv import HostKV
from engine.kv_cache import KVCache
from engine.kv_copies import KVCopies
from engine.request import Request
from engine.wire_memory import WireMemory
from kv_transfer.block_mix import block_mix64
from tests.unit.fake_runner import EOS, VOCAB, next_token

LAYERS = 2
Clock = dict[int, int]


class Race(AssertionError):
    """Two accesses to one place with no order between them."""


class PlayedStream:
    def __init__(self, device: PlayedDevice) -> None:
        self.cuda_stream = 0
        self.number = len(device.streams)
        self.count = 0
        self.clock: Clock = {}
        """What is over before the next operation begins, as far as anything makes sure of it."""
        self._device = device
        device.streams.append(self)

    def wait_event(self, event: PlayedEvent) -> None:
        assert event.clock is not None, "a wait for an event that was never recorded is none"
        merge(self.clock, event.clock)

    def wait_stream(self, other: PlayedStream) -> None:
        merge(self.clock, other.clock)


class PlayedEvent:
    def __init__(self, device: PlayedDevice) -> None:
        self.clock: Clock | None = None
        self._device = device

    def record(self, stream: PlayedStream | None = None) -> None:
        self.clock = dict((stream or self._device.current).clock)

    def synchronize(self) -> None:
        assert self.clock is not None, "waiting for an event that was never recorded returns at once"
        merge(self._device.host, self.clock)

    def query(self) -> bool:
        assert self.clock is not None
        if self._device.random.random() < 0.7:
            return False
        self.synchronize()
        return True


def merge(clock: Clock, other: Clock) -> None:
    for number, count in other.items():
        clock[number] = max(clock.get(number, 0), count)


@dataclass(slots=True)
class Place:
    writer: tuple[int, int, str] | None = None
    readers: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    """The last one of each stream."""


class PlayedDevice:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.streams: list[PlayedStream] = []
        self.host: Clock = {}
        self.steps = PlayedStream(self)
        self.current = self.steps
        self._places: dict[Hashable, Place] = defaultdict(Place)

    def launch(self, what: str, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        """An operation on the current stream, which touches these places."""
        stream = self.current
        merge(stream.clock, self.host)
        before = dict(stream.clock)
        stream.count += 1
        stream.clock[stream.number] = stream.count
        self._touch(what, before, (stream.number, stream.count, what), reads, writes)

    def touch_from_host(self, what: str, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> None:
        self._touch(what, self.host, None, reads, writes)

    def _touch(
        self,
        what: str,
        before: Clock,
        me: tuple[int, int, str] | None,
        reads: Iterable[Hashable],
        writes: Iterable[Hashable],
    ) -> None:
        for where in reads:
            place = self._places[where]
            self._check(what, before, place.writer, where)
            if me is not None:
                place.readers[me[0]] = me
        for where in writes:
            place = self._places[where]
            for other in (place.writer, *place.readers.values()):
                if other is not me:
                    self._check(what, before, other, where)
            place.writer, place.readers = me, {}

    @staticmethod
    def _check(what: str, before: Clock, other: tuple[int, int, str] | None, where: Hashable) -> None:
        if other is not None and before.get(other[0], 0) < other[1]:
            raise Race(f"{what!r} at {where} is not put behind {other[2]!r}")

    # --- the kernels of kv_copies ---

    def copy(self, target: int, source: int, num_bytes: int, stream: PlayedStream) -> None:
        ctypes.memmove(target, source, num_bytes)

    def record(self, event: PlayedEvent, stream: PlayedStream) -> None:
        event.record(stream)

    def move_kv(
        self,
        cache: torch.Tensor,
        jobs: torch.Tensor,
        ids: torch.Tensor,
        rows: torch.Tensor,
        mixes: torch.Tensor,
        num_jobs: int,
        num_planes: int,
        num_tokens: int,
        *,
        pack: bool,
    ) -> None:
        _, _, _, heads, size, words = cache.shape
        kv, planes = cache.numpy(), 2 * heads
        for index, (address, job_planes, first_plane, job_tokens, start, first_id) in enumerate(
            jobs[:num_jobs].tolist()
        ):
            layers = range(first_plane // planes, (first_plane + job_planes) // planes)
            wire = words_at(address, job_planes * job_tokens * words).reshape(len(layers), 2, heads, job_tokens, words)
            cells = []
            for token in range(job_tokens):
                block, offset = int(ids[first_id + (start + token) // size]), (start + token) % size
                for at, layer in enumerate(layers):
                    cells.append((layer, block, offset))
                    if pack:
                        wire[at, :, :, token] = kv[layer, block, :, :, offset]
                    else:
                        kv[layer, block, :, :, offset] = wire[at, :, :, token]
            if pack:
                self.launch("pack", cells, [("wire", address)])
            else:
                self.launch("unpack", [("wire", address)], cells)
            mixes[index] = signed(block_mix64(wire.tobytes()))

    def copy_words(self, source: WireMemory, target: torch.Tensor, row: torch.Tensor, mix: torch.Tensor) -> None:
        words = words_at(source.address, target.numel())
        target.numpy()[:] = words
        self.launch("copy", [("wire", source.address)])
        mix[0] = signed(block_mix64(words.tobytes()))


def words_at(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


def signed(mix: int) -> int:
    return mix - (1 << 64) if mix >> 63 else mix


@contextlib.contextmanager
def played(device: PlayedDevice) -> Iterator[None]:
    """torch.cuda, as far as ``kv_copies`` uses it."""
    zeros = torch.zeros

    @contextlib.contextmanager
    def on(stream: PlayedStream) -> Iterator[None]:
        before, device.current = device.current, stream
        try:
            yield
        finally:
            device.current = before

    def host_zeros(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return zeros(*shape, **options)

    with (
        mock.patch.multiple(
            torch.cuda,
            Stream=lambda *_: PlayedStream(device),
            Event=lambda **_: PlayedEvent(device),
            stream=on,
            current_stream=lambda *_: device.current,
            set_device=lambda *_: None,
        ),
        mock.patch.object(torch, "zeros", host_zeros),
        mock.patch.multiple(
            kv_copies, CudaCalls=lambda: device, move_kv=device.move_kv, copy_words=device.copy_words, _DESKS=2
        ),
    ):
        yield


# ---- an engine's device side


def value_of(token_ids: Sequence[int], layer: int) -> float:
    """What KV of the last of these tokens has to be; exact as a float16, too."""
    return float(zlib.crc32(repr((layer, list(token_ids))).encode()) % 2039)


class PlayedRunner:
    """``AsyncRunner``: tokens as in ``FakeRunner``; KV of a token depends on all before it, as real KV does."""

    max_model_len = 40
    eos_token_ids = (EOS,)
    model_fingerprint = "played"
    vocab_size = VOCAB
    padded_rows = ()

    def __init__(self, config: EngineConfig, device: PlayedDevice, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.kv_cache = KVCache(
            num_layers=LAYERS,
            num_blocks=num_blocks,
            num_kv_heads=1,
            block_size=config.block_size,
            head_dim=2,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.copies = self.kv_cache.__dict__["copies"] = KVCopies(self.kv_cache._data)
        self._device = device
        self._size = config.block_size
        self._tokens: dict[Request, list[int]] = {}
        """What the device knows: with the tokens that the host has not read yet."""

    def run(self, batch: ScheduledBatch, on_layers: Callable[[int, int], None] | None = None) -> SampledBatch:
        return self.launch(batch, on_layers).result()

    def launch(self, batch: ScheduledBatch, on_layers: Callable[[int, int], None] | None = None) -> PlayedStep:
        for layer in range(LAYERS):
            for item in batch.items:
                self._compute(item.request, item.start, item.start + item.num_tokens, layer)
            if on_layers is not None:
                on_layers(layer, layer + 1)
        drawn: list[int | None] = []
        for item in batch.items:
            tokens = self._known(item.request)
            drawn.append(next_token(tokens) if item.needs_sample else None)
            self._tokens[item.request] = [*tokens, next_token(tokens)] if item.needs_sample else tokens
        done = PlayedEvent(self._device)
        done.record()
        return PlayedStep(done, SampledBatch(drawn, [None] * len(drawn)))

    def _known(self, request: Request) -> list[int]:
        tokens = self._tokens.get(request, [])
        return tokens if len(tokens) > request.num_tokens else list(request.all_token_ids)

    def _compute(self, request: Request, start: int, end: int, layer: int) -> None:
        tokens = self._known(request)
        assert end <= len(tokens), "a token was scheduled that nobody knows"
        cells = [(layer, request.block_table[at // self._size], at % self._size) for at in range(end)]
        self._device.launch(f"step of {request.request_id}", cells[:start], cells[start:])
        kv = self.kv_cache.layers[layer].numpy()
        for at, (_, block, offset) in enumerate(cells):
            value = value_of(tokens[: at + 1], layer)
            if at >= start:
                kv[block, :, :, offset] = value
            assert (kv[block, :, :, offset] == value).all(), f"{request.request_id}: other KV at {at}, layer {layer}"


@dataclass(slots=True)
class PlayedStep:
    done: PlayedEvent
    sampled: SampledBatch

    def is_done(self) -> bool:
        return self.done.query()

    def result(self) -> SampledBatch:
        self.done.synchronize()
        return self.sampled


class PlayedHostKV(HostKV):
    def __init__(self, runner: PlayedRunner, device: PlayedDevice, num_blocks: int, left: Callable[[], None]) -> None:
        self._device = device
        self._block_size = runner.kv_cache.block_size
        block_bytes = KVCache.bytes_per_block(LAYERS, 1, self._block_size, 2, torch.float32)
        super().__init__(runner.kv_cache, num_blocks * block_bytes, left)
        self.bytes_per_s = 1e12

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self._device.launch("to the host", self._cells(block_ids), [("host", slot) for slot in slots])
        super().copy_out(block_ids, slots)

    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        self._device.launch("from the host", [("host", slot) for slot in slots], self._cells(block_ids))
        super().copy_in(slots, block_ids)

    def _wait(self) -> None:
        merge(self._device.host, self._device.steps.clock)

    def _cells(self, block_ids: Sequence[int]) -> list[Hashable]:
        return [(layer, block, at) for layer in range(LAYERS) for block in block_ids for at in range(self._block_size)]


class PlayedWaiter:
    """``CopyWaiter`` without its thread: what it waits for is over when the test says so."""

    def __init__(self) -> None:
        self._started: list[tuple[Sequence[Any], Callable[[list[int]], None]]] = []

    def when_done(self, copies: Sequence[Any], then: Callable[[list[int]], None]) -> None:
        self._started.append((copies, then))

    def go_on(self) -> bool:
        """Whether there was anything to wait for."""
        if not self._started:
            return False
        copies, then = self._started.pop(0)
        then([copy.wait() for copy in copies])
        return True

    def check(self) -> None:
        """Nothing goes wrong here."""

    def close(self) -> None:
        while self.go_on():
            pass
