"""Rolling updates of a real fleet: nobody's request fails, no answer changes, versions live side by side."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import pdserve
from tests.e2e.client import complete_all
from tests.e2e.cluster import Cluster, Member, running, wait_until
from tests.e2e.oracle import Oracle
from tests.services.tiny_model import write_tiny_model
from tests.services.worker_cluster import prompt_of

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parents[2]
PROGRAM = ["pdserve", "registry", "telemetry", "engine", "kv_transfer", "worker", "prefill_service", "decode_service"]
MAX_TOKENS = 400
PROMPTS = [prompt_of(length, seed=length) for length in (40, 90, 150, 230, 310, 400)]
WORKER_FLAGS = ("--dtype", "float32", "--max-num-batched-tokens", "64", "--num-threads", "1", "--num-blocks", "400")


def write_model(directory: Path, seed: int = 0) -> Path:
    """A tiny model with a tokenizer: the gateway wants one, although these prompts are token ids."""
    write_tiny_model(directory, seed)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>").save_pretrained(directory)
    return directory


def answers_of(model: Path) -> tuple[Oracle, list[list[int]]]:
    """What transformers says to each of PROMPTS."""
    oracle = Oracle(model)
    return oracle, oracle.generate(PROMPTS, MAX_TOKENS)


class LoadBalancer:
    """Sends each request to a gateway that says it is ready, as whatever stands before gateways does."""

    def __init__(self, gateways: list[Member]) -> None:
        self._urls = [f"http://127.0.0.1:{member.port}" for member in gateways]
        self._turn = itertools.count()
        self._ready = set(self._urls)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def url(self) -> str:
        while not (ready := [url for url in self._urls if url in self._ready]):
            assert not self._stopped.wait(0.05), "no gateway is ready"
        return ready[next(self._turn) % len(ready)]

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(0.1):
            for url in self._urls:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{url}/health", timeout=10).status_code == 200:
                        self._ready.add(url)
                        continue
                self._ready.discard(url)


class Load:
    """Clients that ask one prompt after the other until told to stop: by HTTP, whole and streamed, and by the SDK."""

    def __init__(self, gateways: list[Member]) -> None:
        self.answered: list[tuple[int, list[int]]] = []
        """Which of PROMPTS, and what came."""
        self.failed: list[str] = []
        self._balancer = LoadBalancer(gateways)
        addresses = [f"127.0.0.1:{member.argv[member.argv.index('--grpc-port') + 1]}" for member in gateways]
        self._sdk = pdserve.Client(addresses)
        self._stopped = threading.Event()
        self._turn = itertools.count()
        ways = (self._whole, self._whole, self._streamed, self._streamed, self._by_sdk)
        self._pool = ThreadPoolExecutor(len(ways))
        self._futures = [self._pool.submit(self._ask, way) for way in ways]

    def stop(self) -> None:
        """Raises what a client could not make sense of."""
        self._stopped.set()
        for future in self._futures:
            future.result(timeout=120)
        self._pool.shutdown()
        self._balancer.close()
        self._sdk.close()

    def _ask(self, way: Callable[[list[int]], list[int]]) -> None:
        while not self._stopped.is_set():
            number = next(self._turn) % len(PROMPTS)
            try:
                self.answered.append((number, way(PROMPTS[number])))
            except (httpx.HTTPError, pdserve.PdserveError, Failed) as error:
                self.failed.append(f"{way.__name__}: {error!r}")

    def _by_sdk(self, prompt: list[int]) -> list[int]:
        answer = self._sdk.generate(prompt, max_tokens=MAX_TOKENS, temperature=0, deadline_s=120)
        return list(answer.choices[0].token_ids)

    def _whole(self, prompt: list[int]) -> list[int]:
        response = httpx.request(**self._request(prompt, stream=False))
        if response.status_code != 200:
            raise Failed(response.text)
        return list(response.json()["choices"][0]["token_ids"])

    def _streamed(self, prompt: list[int]) -> list[int]:
        token_ids: list[int] = []
        with httpx.stream(**self._request(prompt, stream=True)) as response:
            if response.status_code != 200:
                raise Failed(response.read().decode())
            for event in events(response):
                if event == b"[DONE]":
                    return token_ids
                chunk = json.loads(event)
                if "error" in chunk:
                    raise Failed(event.decode())
                token_ids += chunk["choices"][0].get("token_ids") or []
        raise Failed(f"the stream broke off after {len(token_ids)} tokens")

    def _request(self, prompt: list[int], stream: bool) -> dict[str, Any]:
        body = {"model": "test-model", "prompt": prompt, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": stream}
        url = f"{self._balancer.url()}/v1/completions"
        return {"method": "POST", "url": url, "json": body | {"return_token_ids": True}, "timeout": 120}


def events(response: httpx.Response) -> Iterator[bytes]:
    """Data of server-sent events. Not by lines of text: a random model says U+0085, which ends a line there, too."""
    buffer = b""
    for data in response.iter_bytes():
        *whole, buffer = (buffer + data).split(b"\n\n")
        yield from (event.removeprefix(b"data: ") for event in whole)


class Failed(Exception):
    """An answer that is none."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Cluster]:
    """2 P + 2 D + 2 routers + 2 gateways. Some do not wait for what runs, so that it has to go on elsewhere."""
    model = write_model(tmp_path / "model")
    router_flags = ("--drain-timeout-s", "0.1")
    gateway_flags = ("--lame-duck-s", "5", "--drain-timeout-s", "60")
    cluster = Cluster(tmp_path, str(model))
    try:
        cluster.add_redis()
        for i in range(2):
            cluster.add_router(f"router-{i}", "--min-prefill-workers", "2", "--min-decode-workers", "2", *router_flags)
            cluster.add_worker(f"prefill-{i}", *WORKER_FLAGS, "--drain-timeout-s", "20")
            cluster.add_worker(f"decode-{i}", *WORKER_FLAGS, "--drain-timeout-s", "0")
        for i in range(2):
            cluster.add_gateway(*gateway_flags, name=f"gateway-{i}")
        cluster.wait_healthy()
        yield cluster
    finally:
        cluster.stop()


def test_a_fleet_is_rolled_under_load(fleet: Cluster) -> None:
    oracle, expected = answers_of(Path(fleet.model))
    load = Load([fleet["gateway-0"], fleet["gateway-1"]])
    moved = 0.0
    try:
        for i in range(2):
            for role in ("prefill", "decode", "router", "gateway"):
                member = fleet[f"{role}-{i}"]
                answered = len(load.answered)
                if role == "router":
                    moved += member.metrics()["pdserve_migrations_total"]
                if role == "decode":
                    is_busy = partial(has_requests, member)
                    wait_until(f"{member.name} is in the middle of answers", is_busy)
                assert member.terminate(timeout_s=90) == 0, f"{member.name} did not drain\n{member.tail()}"
                member.start()
                member.wait_healthy()
                deadline_s = time.monotonic() + 60
                while len(load.answered) <= answered and time.monotonic() < deadline_s:
                    time.sleep(0.1)
    finally:
        load.stop()
    assert load.failed == []
    assert len(load.answered) > 8
    for number, token_ids in load.answered:
        oracle.assert_same(PROMPTS[number], token_ids, expected[number], f"prompt {number}")
    moved += sum(fleet[f"router-{i}"].metrics()["pdserve_migrations_total"] for i in range(2))
    assert moved > 0, "no answer was in the middle when its worker left"
    fleet.assert_no_leak()


def has_requests(member: Member) -> bool:
    return member.metrics()["vllm:num_requests_running"] > 0


def other_version(directory: Path) -> Path:
    """This program as it may be one day: the KV's format on the wire is another one."""
    for package in PROGRAM:
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    layout = directory / "kv_transfer" / "layout.py"
    changed, count = re.subn(r"^WIRE_VERSION = \d+$", "WIRE_VERSION = 999", layout.read_text(), flags=re.MULTILINE)
    assert count == 1
    layout.write_text(changed)
    return directory


def test_two_versions_side_by_side(tmp_path: Path) -> None:
    """Another format on the wire, then another model: each pair keeps to itself, and every answer is one model's."""
    old, new = write_model(tmp_path / "old"), write_model(tmp_path / "new", seed=1)
    oracle, expected = answers_of(old)
    other_oracle, other_expected = answers_of(new)
    source = other_version(tmp_path / "source")
    turns = ("--policy", "round_robin")  # so that each pair gets its part
    with running(tmp_path, str(old), worker_flags=WORKER_FLAGS, router_flags=turns) as cluster:

        def ask() -> list[list[int]]:
            return [answer.token_ids for answer in complete_all(cluster.url, PROMPTS * 2, 6, max_tokens=MAX_TOKENS)]

        def assert_each_pair_worked(*names: str) -> None:
            for name in names:
                samples = cluster[name].metrics()
                assert samples["pdserve_transfers_done_total"] > 0, f"{name} had nothing to do"
                assert samples.get("pdserve_transfers_failed_total", 0) == 0, f"{name}: {samples}"

        for name in ("prefill-wire2", "decode-wire2"):
            cluster.add_worker(name, *WORKER_FLAGS, source=source)
        cluster.wait_healthy()
        wait_usable(cluster, 4)
        for n, token_ids in enumerate(ask()):
            number = n % len(PROMPTS)
            oracle.assert_same(PROMPTS[number], token_ids, expected[number], f"prompt {number}")
        assert_each_pair_worked("prefill-0", "decode-0", "prefill-wire2", "decode-wire2")
        for name in ("prefill-wire2", "decode-wire2"):
            assert cluster.members.pop(name).terminate(60) == 0
        wait_usable(cluster, 2)  # else those two could be counted for the next two

        for name in ("prefill-model2", "decode-model2"):
            cluster.add_worker(name, "--model", str(new), *WORKER_FLAGS)
        cluster.wait_healthy()
        wait_usable(cluster, 4)
        for n, token_ids in enumerate(ask()):
            number = n % len(PROMPTS)
            if token_ids[:8] == other_expected[number][:8]:
                other_oracle.assert_same(
                    PROMPTS[number], token_ids, other_expected[number], f"prompt {number}, model 2"
                )
            else:
                oracle.assert_same(PROMPTS[number], token_ids, expected[number], f"prompt {number}")
        assert_each_pair_worked("prefill-0", "decode-0", "prefill-model2", "decode-model2")
        cluster.assert_no_leak()


def wait_usable(cluster: Cluster, count: int) -> None:
    """The router knows so many workers, half of them of each role, and may use them all."""

    def all_usable() -> bool:
        metrics = cluster["router"].metrics()
        usable = [metrics.get(f"pdserve_workers{{role={role},state=usable}}", 0) for role in ("prefill", "decode")]
        return usable == [count / 2] * 2 and metrics["pdserve_workers"] == count

    wait_until(f"{count} workers are usable", all_usable)
