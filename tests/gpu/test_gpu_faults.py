"""kill -9 and SIGSTOP of each side in the middle of a KV transfer between GPUs, through the whole service.

A gateway, a router, a prefill worker on the first GPU and a decode worker on the last one (the same, where there is one
only). Random weights, fp32, prompts so long that their transfers take a while. Everything is judged from outside: what
each client got against transformers, metrics, the memory of the devices and of the processes. A stopped side is woken
before its requests are judged, a killed service is started again, a killed engine by its service.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

from bench.random_models import write_tokenizer
from tests.e2e.cluster import Cluster, Member, running, wait_until
from tests.e2e.oracle import Oracle
from tests.faults.asking import LOSS, Asking

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICES = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
SHAPE: dict[str, int] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "vocab_size": 4096,
}
PROMPT_TOKENS, MAX_TOKENS, NUM_PROMPTS = 6000, 160, 4
FLAGS = ("--dtype", "float32", "--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--max-model-len", "8192")
FLAGS += ("--num-blocks", "600")
REACH_TIMEOUT_S, TIMEOUT_S, LATE_S = 15.0, 30.0, 2.0
STOPPED_S = 3.0
"""Longer than a session, a lease's renewal and a peer's patience: the others go on without it."""
DEVICE_SLACK_BYTES = 128 << 20
"""Less than the sender's staging, which is what a receiver would keep mapped of a dead one."""
HOST_SLACK_BYTES = 256 << 20

CELLS = [
    (how, side, process)
    for how, process in ((signal.SIGKILL, "engine"), (signal.SIGSTOP, "engine"),
                         (signal.SIGKILL, "service"), (signal.SIGSTOP, "service"))
    for side in ("prefill-0", "decode-0")
]  # fmt: skip


class World:
    """The running cluster, what it should answer, and what it held at rest."""

    def __init__(self, cluster: Cluster, oracle: Oracle, prompts: list[list[int]], expected: list[list[int]]) -> None:
        self.cluster, self.oracle, self.prompts, self.expected = cluster, oracle, prompts, expected
        self.device_bytes: list[int] = []
        self.host_bytes: dict[int, int] = {}

    def ask(self, index: int, shape: str = "stream") -> Asking:
        gateway = self.cluster["gateway"].port
        return Asking(
            gateway, self.cluster.grpc_port, self.prompts[index], MAX_TOKENS, shape=shape, timeout_s=TIMEOUT_S
        )

    def assert_right(self, index: int, asking: Asking, allowed: frozenset[str]) -> None:
        """It ended once, in time, with the oracle's answer, or with an allowed error after a part of it."""
        outcome, want = asking.wait(), self.expected[index]
        assert outcome.kind == "answer" or outcome.code in allowed, outcome.told
        assert outcome.terminals == 1, outcome.told
        assert outcome.elapsed_s < TIMEOUT_S + LATE_S, outcome.elapsed_s
        if outcome.kind == "error":
            want = want[: len(outcome.token_ids)]
        self.oracle.assert_same(self.prompts[index], outcome.token_ids, want, f"prompt {index}, {outcome}")

    def note_rest(self) -> None:
        self.device_bytes = used_device_bytes()
        self.host_bytes = {pid: psutil.Process(pid).memory_info().rss for pid in self.pids()}

    def pids(self) -> list[int]:
        members = (psutil.Process(member.pid) for name, member in self.cluster.members.items() if name != "redis")
        return [p.pid for member in members for p in (member, *member.children(recursive=True))]

    def why_not_at_rest(self) -> str:
        """What the devices or a process that lived before have more of than at rest; or nothing."""
        for name in ("gateway", "router"):
            if count := self.cluster[name].metrics()["pdserve_open_requests"]:
                return f"{name}: {count:g} requests are open"
        for device, used, before in zip(DEVICES, used_device_bytes(), self.device_bytes, strict=True):
            if used > before + DEVICE_SLACK_BYTES:
                return f"{device}: {used >> 20} MiB are in use, {before >> 20} at first"
        for pid in self.pids():
            rss, before = psutil.Process(pid).memory_info().rss, self.host_bytes.get(pid)
            if before is not None and rss > before + HOST_SLACK_BYTES:
                return f"process {pid} has {rss >> 20} MiB, {before >> 20} at first"
        return ""


def used_device_bytes() -> list[int]:
    """Of whole devices: whoever keeps memory of a dead process mapped is seen, too."""
    infos = [torch.cuda.mem_get_info(device) for device in DEVICES]
    return [total - free for free, total in infos]


def write_model(directory: Path) -> None:
    """Random, with weights so large that its answers depend on the prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options: dict[str, Any] = {"max_position_embeddings": 8192, "initializer_range": 0.04, "bos_token_id": 1}
    torch.manual_seed(1)
    with torch.device(DEVICES[0]):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE, **options, eos_token_id=2, tie_word_embeddings=False))
    model.float().save_pretrained(directory)
    settings = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**settings, "torch_dtype": "float32"}))
    write_tokenizer(SHAPE["vocab_size"], directory)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("cluster")
    write_model(directory / "model")
    rng = np.random.default_rng(3)
    prompts = rng.integers(100, SHAPE["vocab_size"], (NUM_PROMPTS, PROMPT_TOKENS)).tolist()
    sides = {"prefill_flags": ("--device", DEVICES[0]), "decode_flags": ("--device", DEVICES[-1])}
    oracle = Oracle(directory / "model")
    oracle.model.to(DEVICES[0])
    pool = ThreadPoolExecutor(1)
    answers = pool.submit(oracle.generate, prompts, MAX_TOKENS)  # while the engines start
    with pool, running(directory, f"{directory}/model", worker_flags=FLAGS, **sides) as cluster:
        expected = answers.result()
        assert len({tuple(answer) for answer in expected}) == NUM_PROMPTS, "answers that do not depend on the prompt"
        world = World(cluster, oracle, prompts, expected)
        for _ in range(2):
            for index, asking in enumerate([world.ask(index) for index in range(NUM_PROMPTS)]):
                world.assert_right(index, asking, frozenset())
        assert count(cluster["decode-0"], "pdserve_transfers_done_total") == 2 * NUM_PROMPTS
        cluster.assert_no_leak()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        world.note_rest()
        yield world
        assert not oracle.ties, oracle.ties


def count(member: Member, name: str) -> float:
    """0 while it does not answer."""
    with contextlib.suppress(httpx.HTTPError):
        return member.metrics().get(name, 0.0)
    return 0.0


def is_gone(pid: int) -> bool:
    """Also when whoever inherited it has not looked yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_transfer(world: World, asked: list[Asking], segments: float) -> None:
    """Until one request streams and the KV of another is on its way."""
    decode = world.cluster["decode-0"]

    def seen() -> bool:
        samples = decode.metrics()
        moves = samples["pdserve_leases"] >= 1 and samples["pdserve_transfer_segments_total"] > segments
        return moves and any(asking.num_tokens for asking in asked)

    deadline_s = time.monotonic() + REACH_TIMEOUT_S
    while not seen():
        assert time.monotonic() < deadline_s, "no transfer was seen under way"
    assert not all(asking.is_over for asking in asked)


@pytest.mark.parametrize(("how", "side", "process"), CELLS, ids=lambda value: getattr(value, "name", value))
def test_in_the_middle_of_a_transfer(world: World, how: signal.Signals, side: str, process: str) -> None:
    cluster, member = world.cluster, world.cluster[side]
    began_s = time.monotonic()
    segments = count(cluster["decode-0"], "pdserve_transfer_segments_total")
    asked = [world.ask(index, "whole" if index == 1 else "stream") for index in range(NUM_PROMPTS)]
    wait_transfer(world, asked, segments)

    engine = member.engine_pid()
    pid = engine if process == "engine" else member.pid
    os.kill(pid, how)
    if how == signal.SIGSTOP:
        time.sleep(STOPPED_S)
        with contextlib.suppress(ProcessLookupError):  # its service has given it up, and started another
            os.kill(pid, signal.SIGCONT)
    elif process == "service":
        member.kill()
        member.start()
    for index, asking in enumerate(asked):
        world.assert_right(index, asking, LOSS)
    ended = [str(asking.wait()) for asking in asked]
    moments = {"ended": time.monotonic() - began_s}

    if how == signal.SIGKILL:
        wait_until("the old engine is gone", lambda: is_gone(engine))
    member.wait_healthy()
    moments["healthy"] = time.monotonic() - began_s
    done = count(cluster["decode-0"], "pdserve_transfers_done_total")
    for index, asking in enumerate([world.ask(index) for index in range(2)]):
        world.assert_right(index, asking, frozenset())
    wait_until("KV is handed over again", lambda: count(cluster["decode-0"], "pdserve_transfers_done_total") > done)
    moments["serves"] = time.monotonic() - began_s
    cluster.assert_no_leak()
    wait_until(f"at rest: {world.why_not_at_rest()}", lambda: not world.why_not_at_rest())
    moments["at rest"] = time.monotonic() - began_s
    when = ", ".join(f"{what} after {moment_s:.1f} s" for what, moment_s in moments.items())
    print(f"{how.name} {side} {process}: {', '.join(ended)}; {when}")
