"""An engine process with a fake runner: ``python -m tests.unit.fake_engine_main TO FROM PARENT_PID [FAULT]``.

FAULT is what its start fails with; or ``lagging``: steps are launched ahead, and over when a peer was lost.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from engine.batch import SampledBatch, ScheduledBatch
from engine.messages import EngineReady, EngineStats, PeerFrame
from engine.process import Engine, EngineProcess
from tests.unit.fake_async_runner import FakeAsyncRunner, make_async_core
from tests.unit.fake_runner import FakeRunner, make_core


class PoisonedRunner(FakeRunner):
    """Fails on the prompt 13, 13. Counts how often it was told that nothing is left to do."""

    rests = 0

    def rest(self) -> None:
        self.rests += 1

    def run(self, batch: ScheduledBatch, on_layers: Callable[[int, int], None] | None = None) -> SampledBatch:
        if any(item.request.prompt_token_ids == [13, 13] for item in batch.items):
            raise RuntimeError("the device\nis on fire")
        return super().run(batch, on_layers)


class EchoHandoff:
    """Answers each frame from another thread, as a data plane would: queue, wakeup, sent by the next poll."""

    def __init__(self, process: EngineProcess) -> None:
        self.process = process
        self.num_rests: Callable[[], int] = lambda: 0
        self.lost_peers = 0
        self.done: list[PeerFrame] = []

    def on_frame(self, peer: str, payload: bytes) -> None:
        def later() -> None:
            time.sleep(0.02)
            self.done.append(PeerFrame(peer, payload[::-1]))
            self.process.wakeup()

        threading.Thread(target=later).start()

    def on_peer_alive(self, peer: str) -> None:
        self.process.send(PeerFrame(peer, b"alive"))

    def on_peer_lost(self, peer: str, reason: str) -> None:
        self.lost_peers += 1
        self.process.send(PeerFrame(peer, b"lost: " + reason.encode()))

    def poll(self) -> None:
        while self.done:
            self.process.send(self.done.pop())

    def next_deadline_s(self) -> float | None:
        return None

    def fill_stats(self, stats: EngineStats) -> None:
        stats.leases = 42
        stats.tombstones = self.num_rests()  # a number that nothing else here uses


def main() -> int:
    to_engine, from_engine, parent_pid, *fault = sys.argv[1:]

    def build(process: EngineProcess) -> Engine:
        handoff = EchoHandoff(process)
        if fault == ["lagging"]:
            core = make_async_core()
            assert isinstance(core.runner, FakeAsyncRunner)
            core.runner.is_done = lambda: handoff.lost_peers > 0
        elif fault:
            raise ValueError(fault[0])
        else:
            core = make_core()
            core.runner = runner = PoisonedRunner(core.config)
            handoff.num_rests = lambda: runner.rests
        ready = EngineReady(
            model_fingerprint="fake",
            vocab_size=50,
            max_model_len=64,
            block_size=4,
            hash_block_tokens=2,
            num_blocks=16,
            num_layers=3,
            num_kv_heads=1,
            head_dim=1,
            kv_dtype="float32",
            kv_bytes=0,
            eos_token_ids=[7],
        )
        return Engine(core, ready, handoff)

    return EngineProcess(to_engine=to_engine, from_engine=from_engine, parent_pid=int(parent_pid)).run(build)


if __name__ == "__main__":
    sys.exit(main())
