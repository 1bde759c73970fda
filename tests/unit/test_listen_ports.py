"""What is no port is an error of the service that was told to listen there; gRPC would listen at another."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.config import GatewayConfig
from router.config import RouterConfig
from worker.config import WorkerConfig

WORKER: dict[str, Any] = {
    "role": "decode",
    "worker_id": "d",
    "model": "m",
    "host": "127.0.0.1",
    "redis_url": "redis://127.0.0.1:1",
    "engine_module": "e",
}


def start_router(**ports: int) -> None:
    RouterConfig(redis_url="redis://127.0.0.1:1", **ports)


def start_gateway(**ports: int) -> None:
    GatewayConfig(model="m", served_model_name="m", routers=("127.0.0.1:1",), **ports)


def start_worker(**ports: int) -> None:
    WorkerConfig(**{**WORKER, "port": 0, "metrics_port": 0, **ports})


@pytest.mark.parametrize("port", [-1, 65536, 99999])
@pytest.mark.parametrize(
    ("start", "flag"),
    [
        (start_router, "--port"),
        (start_router, "--metrics-port"),
        (start_gateway, "--port"),
        (start_gateway, "--grpc-port"),
        (start_worker, "--port"),
        (start_worker, "--metrics-port"),
        (start_worker, "--data-port"),
    ],
)
def test_it_is_named(start: Any, flag: str, port: int) -> None:
    with pytest.raises(ValueError, match=rf"^{flag} {port} is not a port"):
        start(**{flag[2:].replace("-", "_"): port})


def test_the_port_after_the_last_one() -> None:
    with pytest.raises(ValueError, match=r"^--grpc-port 65536 is not a port"):
        start_gateway(port=65535)
    start_gateway(port=65535, grpc_port=65534)
    start_worker(port=65535, metrics_port=1)
