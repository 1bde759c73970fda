"""What a service cannot do is an error that names the setting: ports that are none, waits without an end."""

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


def start_router(**settings: Any) -> None:
    RouterConfig(redis_url="redis://127.0.0.1:1", **settings)


def start_gateway(**settings: Any) -> None:
    GatewayConfig(model="m", served_model_name="m", routers=("127.0.0.1:1",), **settings)


def start_worker(**settings: Any) -> None:
    WorkerConfig(**{**WORKER, "port": 0, "metrics_port": 0, **settings})


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
def test_what_is_no_port(start: Any, flag: str, port: int) -> None:
    """gRPC would listen at another one and say nothing."""
    with pytest.raises(ValueError, match=rf"^{flag} {port} is not a port"):
        start(**{flag[2:].replace("-", "_"): port})


@pytest.mark.parametrize("router", ["router", "router:", ":9000", "router:0", "router:65536", "router:x"])
def test_what_is_no_router(router: str) -> None:
    with pytest.raises(ValueError, match=r"is not HOST:PORT: use --router"):
        GatewayConfig(model="m", served_model_name="m", routers=("127.0.0.1:1", router))


def test_the_port_after_the_last_one() -> None:
    with pytest.raises(ValueError, match=r"^--grpc-port 65536 is not a port"):
        start_gateway(port=65535)
    start_gateway(port=65535, grpc_port=65534)
    start_worker(port=65535, metrics_port=1)


@pytest.mark.parametrize("value", [-1.0, float("inf"), float("nan")])
@pytest.mark.parametrize(
    ("start", "name"),
    [
        (start_router, "no_worker_wait_s"),
        (start_router, "poll_interval_s"),
        (start_router, "drain_timeout_s"),
        (start_router, "max_queue_s"),
        (start_gateway, "default_timeout_s"),
        (start_gateway, "drain_timeout_s"),
        (start_gateway, "lame_duck_s"),
        (start_worker, "drain_timeout_s"),
    ],
)
def test_no_wait_is_without_an_end(start: Any, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name.replace("_", "[-_]")):
        start(**{name: value})
