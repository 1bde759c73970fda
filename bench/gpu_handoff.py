"""What a hand-off adds to the time to the first token: real engines of the Llama-3.1-8B shape, random weights, on GPUs.

    python -m bench.gpu_handoff --output handoff.json

The prefill engine computes a prompt in chunks of 8192 tokens and sends each layer group while it computes the next; the
decode engine's part is real but for its model, which is never run. "exposed" is what remains after the end of the
prefill until everything is verified in the decode engine's blocks. Frames of the control stream take a pipe, not gRPC.
Median of the repeats; the prompts are all different.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from bench.random_models import SHAPES, write_model
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.kv_cache import KVCache
from engine.messages import AddRequest, PeerFrame, ReceiveKV, RequestOutput, SamplingParams, SendKV
from engine.process import NAP_S
from kv_transfer.layout import make_layout
from pdserve.v1 import kv_pb2

MODEL = "llama-3.1-8b"
CHUNK = 8192
BLOCK = 64
TIMEOUT_S = 120.0
SPAWN = multiprocessing.get_context("spawn")
SHAPE = SHAPES[MODEL]
LAYOUT = make_layout(
    model_fingerprint="bench",
    num_layers=SHAPE["num_hidden_layers"],
    num_kv_heads=SHAPE["num_key_value_heads"],
    head_dim=SHAPE["head_dim"],
    hash_block_tokens=16,
    block_size=BLOCK,
    dtype="bfloat16",
)


def config_of(directory: str, device: str, longest: int) -> EngineConfig:
    return EngineConfig(
        model=directory,
        load_format="dummy",
        device=device,
        dtype="bfloat16",
        block_size=BLOCK,
        num_blocks=3 * (longest // BLOCK + 2),
        max_model_len=longest + BLOCK,
        max_num_seqs=8,
        max_num_batched_tokens=CHUNK,
        host_kv_bytes=0,
        staged_steps=2,
        max_peer_pool_fraction=1.0,
    )


class Process:
    """As much of an ``EngineProcess`` as a hand-off needs."""

    def __init__(self, conn: Connection) -> None:
        self.conn = conn
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self.handoff: Any = None

    def send(self, frame: PeerFrame) -> None:
        self.conn.send(("frame", frame.peer, frame.payload))

    def wakeup(self) -> None:
        os.eventfd_write(self.wake_fd, 1)

    def loop(self, core: EngineCore, handoffs: dict[str, Any], attach: Callable[[Any], None]) -> None:
        """Until it is killed. ``attach`` gives the core the hand-off of the lane that is measured."""
        while True:
            wait([self.conn, self.wake_fd], 0.0 if core.has_work() else 0.05)
            self.take_in(core, handoffs, attach)
            for output in [*core.take_news().outputs, *core.step().outputs]:
                self.conn.send(("output", output))

    def take_in(self, core: EngineCore, handoffs: dict[str, Any], attach: Callable[[Any], None]) -> bool:
        """Messages, and what the data plane has. Whether there was a message."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        came = False
        while self.conn.poll():
            came = True
            command, *arguments = self.conn.recv()
            match command:
                case "lane":
                    self.handoff = handoffs[arguments[0]]
                    attach(self.handoff)
                    core.while_waiting = partial(self.while_step_runs, core, handoffs, attach)
                case "add":
                    core.add(arguments[0])
                case "frame":
                    self.handoff.on_frame(*arguments)
        if self.handoff is not None:
            self.handoff.poll()
        return came

    def while_step_runs(self, *arguments: Any) -> bool:
        time.sleep(NAP_S)
        return self.take_in(*arguments)


class NoModel:
    """A runner with KV memory and nothing else: what it draws is token 0."""

    def __init__(self, config: EngineConfig) -> None:
        from engine.batch import SampledBatch

        torch.cuda.set_device(config.device)
        assert config.num_blocks is not None
        assert config.max_model_len is not None
        self.num_blocks, self.max_model_len = config.num_blocks, config.max_model_len
        self.eos_token_ids: list[int] = []
        self.model_fingerprint = "bench"
        self.vocab_size = SHAPE["vocab_size"]
        self.kv_cache = KVCache(
            num_layers=SHAPE["num_hidden_layers"],
            num_blocks=self.num_blocks,
            num_kv_heads=SHAPE["num_key_value_heads"],
            block_size=config.block_size,
            head_dim=SHAPE["head_dim"],
            dtype=torch.bfloat16,
            device=torch.device(config.device),
        )
        self._drawn = SampledBatch

    def run(self, batch: Any, on_layers: Any = None) -> Any:
        count = len(batch.items)
        return self._drawn([0 if item.needs_sample else None for item in batch.items], [None] * count)


def identity(name: str) -> kv_pb2.WorkerIdentity:
    return kv_pb2.WorkerIdentity(worker_id=name, incarnation=1)


def decode(conn: Connection, directory: str, device: str, lanes: list[str], longest: int) -> None:
    from decode_service.engine_main import DecodeHandoff

    config = config_of(directory, device, longest)
    runner = NoModel(config)
    process = Process(conn)
    core = EngineCore(config, runner)
    here = "127.0.0.1"
    handoffs = {
        lane: DecodeHandoff(process, core, runner.kv_cache, identity("d"), LAYOUT, here, here, lane)  # type: ignore[arg-type]
        for lane in lanes
    }
    conn.send("ready")

    def attach(handoff: DecodeHandoff) -> None:
        core.receiver = handoff

    process.loop(core, handoffs, attach)


def prefill(conn: Connection, directory: str, lanes: list[str], longest: int) -> None:
    from engine.gpu_runner import GpuRunner
    from prefill_service.engine_main import PrefillHandoff

    config = config_of(directory, "cuda:0", longest)
    runner = GpuRunner(config)
    process = Process(conn)
    core = EngineCore(config, runner)
    handoffs = {
        lane: PrefillHandoff(process, core, runner.kv_cache, identity("p"), LAYOUT, lane)  # type: ignore[arg-type]
        for lane in lanes
    }
    conn.send("ready")

    def attach(handoff: PrefillHandoff) -> None:
        core.sender = handoff

    process.loop(core, handoffs, attach)


@dataclass(frozen=True)
class HandoffFigure:
    lane: str
    tokens: int
    alone_ms: float
    """Time to the first token of the same prefill engine without a hand-off."""
    ttft_ms: float
    exposed_ms: float
    gb_per_s: float
    """From the first segment to the last: it streams with the prefill."""

    @property
    def exposed_percent(self) -> float:
        return 100 * self.exposed_ms / self.ttft_ms


class Pair:
    def __init__(self, p: Connection, d: Connection) -> None:
        self.p, self.d = p, d
        self._to_p = ""
        self._made = 0
        self._rng = np.random.default_rng(1)

    def prompt(self, tokens: int) -> list[int]:
        drawn: list[int] = self._rng.integers(0, SHAPE["vocab_size"], tokens).tolist()
        return drawn

    def alone(self, tokens: int) -> float:
        self._made += 1
        since_s = time.perf_counter()
        self.p.send(("add", self.request(self.prompt(tokens), 1, None)))
        self.next_output(self.p, f"r-{self._made}")
        return time.perf_counter() - since_s

    def handed_over(self, tokens: int) -> tuple[float, RequestOutput]:
        self._made += 1
        prompt, transfer_id = self.prompt(tokens), f"t-{self._made}"
        since_s = time.perf_counter()
        self.d.send(("add", self.request(prompt, 2, ReceiveKV(transfer_id, 1, "p", 1))))
        self.p.send(("add", self.request(prompt, 2, SendKV(transfer_id, 1, "here:1", "d", 1))))
        first = last = self.next_output(self.d, f"r-{self._made}")
        ttft_s = time.perf_counter() - since_s
        while last.finish_reason is None:
            last = self.next_output(self.d, f"r-{self._made}")
        time.sleep(0.1)  # the prefill engine hears of the end, and frees its blocks
        return ttft_s, first

    def request(self, prompt: list[int], max_tokens: int, handoff: SendKV | ReceiveKV | None) -> AddRequest:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
        return AddRequest(
            request_id=f"r-{self._made}",
            prompt_token_ids=prompt,
            sampling=sampling,
            timeout_s=TIMEOUT_S,
            handoff=handoff,
        )

    def next_output(self, side: Connection, request_id: str) -> RequestOutput:
        """Of this request on that side. Frames are carried meanwhile; what else is said is for nobody."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline_s:
            for conn in (self.p, self.d):
                if not conn.poll(0.0):
                    continue
                kind, *news = conn.recv()
                if kind == "output":
                    output: RequestOutput = news[0]
                    if output.error_message:
                        raise RuntimeError(output.error_message)
                    if conn is side and output.request_id == request_id:
                        return output
                elif conn is self.p:
                    self._to_p = news[0]
                    self.d.send(("frame", "p", news[1]))
                else:
                    self.p.send(("frame", self._to_p, news[1]))
        raise TimeoutError("no output")


def main(
    lanes: Annotated[str, typer.Option(help="Backends, separated by commas.")] = "cuda_ipc,nccl",
    tokens: Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")] = "2048,8192,32768",
    repeats: Annotated[int, typer.Option(help="Of each measurement.")] = 5,
    where: Annotated[str, typer.Option(help="On one GPU, between two, or both.")] = "one,two",
    output: Annotated[Path | None, typer.Option(help="JSON of all figures.")] = None,
) -> None:
    """Exposed part of hand-offs between GPUs, as a part of the time to the first token."""
    lengths = [int(length) for length in tokens.split(",")]
    figures: list[HandoffFigure] = []
    places = {"one GPU": "cuda:0"} if "one" in where.split(",") else {}
    if torch.cuda.device_count() > 1 and "two" in where.split(","):
        places["two GPUs"] = "cuda:1"
    names = lanes.split(",")
    with tempfile.TemporaryDirectory() as directory:
        write_model(MODEL, Path(directory))
        p, theirs = SPAWN.Pipe()
        usable = [name for name in names if name != "nccl" or "two GPUs" in places]
        processes = [SPAWN.Process(target=prefill, args=(theirs, directory, usable, max(lengths)), daemon=True)]
        sides: dict[str, tuple[Connection, list[str]]] = {}
        for where, device in places.items():
            possible = [name for name in usable if name != "nccl" or device != "cuda:0"]
            d, theirs_d = SPAWN.Pipe()
            arguments = (theirs_d, directory, device, possible, max(lengths))
            processes.append(SPAWN.Process(target=decode, args=arguments, daemon=True))
            sides[where] = d, possible
        for process in processes:
            process.start()
        for conn in [p, *(d for d, _ in sides.values())]:
            if not conn.poll(TIMEOUT_S) or conn.recv() != "ready":
                raise TimeoutError("an engine does not start")
        print("| lane | tokens | TTFT without a hand-off | with | exposed | % of TTFT | GB/s while it streams |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for where, (d, possible) in sides.items():
            pair = Pair(p, d)
            for lane in possible:
                for side in (p, d):
                    side.send(("lane", lane))
                for length in lengths:
                    figure = measure(pair, f"{lane}, {where}", length, repeats)
                    figures.append(figure)
                    if output is not None:  # after each: an interrupted run leaves what it has
                        output.write_text(json.dumps([asdict(figure) for figure in figures], indent=1))
                    print(
                        f"| {figure.lane} | {length} | {figure.alone_ms:.1f} ms | {figure.ttft_ms:.1f} ms "
                        f"| {figure.exposed_ms:.2f} ms | {figure.exposed_percent:.2f} | {figure.gb_per_s:.1f} |",
                        flush=True,
                    )
        for process in processes:
            process.kill()


def measure(pair: Pair, lane: str, length: int, repeats: int) -> HandoffFigure:
    pair.alone(length)
    pair.handed_over(length)
    alone_s = [pair.alone(length) for _ in range(repeats)]
    runs = [pair.handed_over(length) for _ in range(repeats)]
    exposed_s, rates = [], []
    for _, first in runs:
        assert first.timings is not None
        assert first.timings.transfer is not None
        exposed_s.append(first.timings.transfer_s)
        rates.append(first.timings.transfer.num_bytes / max(first.timings.transfer.seconds, 1e-9) / 1e9)
    return HandoffFigure(
        lane=lane,
        tokens=length,
        alone_ms=1e3 * statistics.median(alone_s),
        ttft_ms=1e3 * statistics.median(ttft_s for ttft_s, _ in runs),
        exposed_ms=1e3 * statistics.median(exposed_s),
        gb_per_s=statistics.median(rates),
    )


if __name__ == "__main__":
    typer.run(main)
