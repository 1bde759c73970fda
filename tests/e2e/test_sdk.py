"""The SDK and the examples against a real cluster: the same answers as over HTTP, aborts that reach the workers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import pdserve
from tests.e2e.client import complete
from tests.e2e.cluster import Cluster, running

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("sdk"), str(model_dir), worker_flags=("--dtype", "float32")) as cluster:
        yield cluster
        cluster.assert_no_leak()


@pytest.fixture
def address(cluster: Cluster) -> str:
    return f"127.0.0.1:{cluster.grpc_port}"


@pytest.fixture
def client(address: str) -> Iterator[pdserve.Client]:
    with pdserve.Client(address, deadline_s=60) as client:
        yield client


def test_grpc_and_http_are_one_path(cluster: Cluster, client: pdserve.Client, prompts: list[list[int]]) -> None:
    prompt = prompts[0]
    over_http = complete(cluster.url, prompt, max_tokens=24)
    answer = client.generate(prompt, max_tokens=24, temperature=0)
    assert list(answer.token_ids) == over_http.token_ids
    assert answer.text == over_http.text
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.cached_tokens > 0, "the second time the prompt is cached"


def test_a_stream_that_is_left_frees_its_workers(cluster: Cluster, client: pdserve.Client) -> None:
    stream = client.stream("Once upon a time", max_tokens=2000, ignore_eos=True)
    for _ in range(3):
        next(stream)
    stream.cancel()
    with pytest.raises(pdserve.RequestCancelledError):
        stream.result()
    with pytest.raises(pdserve.DeadlineExceededError):
        client.generate("Once upon a time", max_tokens=2000, ignore_eos=True, deadline_s=0.5)
    cluster.assert_no_leak()


def test_every_service_answers_health_checks(cluster: Cluster) -> None:
    ports = [cluster.grpc_port] + [
        member.port for name, member in cluster.members.items() if name not in ("redis", "gateway")
    ]
    assert len(ports) == 4
    for port in ports:
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example: Path, address: str) -> None:
    run = subprocess.run(
        [sys.executable, str(example), address], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip()
    assert not run.stderr
