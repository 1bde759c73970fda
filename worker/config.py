"""Settings of a worker's service process, and the command-line flags that both services share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import typer

from pdserve.address import check_listen_port

WILDCARD_HOSTS = ("0.0.0.0", "::", "")

TRANSFERS = ("auto", "cuda_ipc", "nccl", "shm", "tcp", "ucx")
ROLES = ("prefill", "decode", "aggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Errors in it are raised by ``__post_init__`` with the remedy."""

    role: str
    worker_id: str
    model: str
    host: str
    port: int
    metrics_port: int
    redis_url: str
    advertised_host: str = ""
    """Empty: the host."""
    engine_module: str
    """What the engine process runs."""
    engine_options: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    """Those fields of EngineConfig that were given."""
    transfer: str = "auto"
    """How KV moves between workers."""
    data_port: int = 0
    """Where KV comes over tcp; 0: at a free port."""
    tls_dir: str = ""
    """Certificate, key and authority for every link of the cluster; empty: no TLS."""
    otlp_endpoint: str = ""
    """Collector of traces; empty: no traces."""
    drain_timeout_s: float = 30.0
    """What has not finished so long after SIGTERM is given back, to be resumed elsewhere."""
    engine_silence_s: float = 30.0
    """An engine that says nothing for so long is taken for dead. Longer than the longest step."""

    def __post_init__(self) -> None:
        for flag, port in (
            ("--port", self.port),
            ("--metrics-port", self.metrics_port),
            ("--data-port", self.data_port),
        ):
            check_listen_port(flag, port)
        if self.role not in ROLES:
            raise ValueError(f"--role {self.role} is not one of {', '.join(ROLES)}")
        if self.transfer not in TRANSFERS:
            raise ValueError(f"--transfer {self.transfer} is not one of {', '.join(TRANSFERS)}")
        if not self.worker_id or any(c.isspace() for c in self.worker_id):
            raise ValueError(f"--worker-id {self.worker_id!r}: use a name without spaces")
        if self.host in WILDCARD_HOSTS and not self.advertised_host:
            raise ValueError(f"--host {self.host} is no address that others can reach: add --advertised-host")
        if self.data_port and (self.transfer not in ("auto", "tcp") or self.role != "decode"):
            raise ValueError(f"--data-port {self.data_port} is where a decode worker takes KV over tcp: leave it out")
        if not 0 <= self.drain_timeout_s < math.inf:
            raise ValueError(
                f"--drain-timeout-s {self.drain_timeout_s}: use seconds, or 0 (give everything back at once)"
            )
        if not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError(f"--redis {self.redis_url!r}: use redis://host:port, rediss://host:port or unix:///path")

    @property
    def reachable_host(self) -> str:
        return self.advertised_host or self.host


Model = Annotated[str, typer.Option(help="Directory or hub name (org/name).")]
WorkerId = Annotated[str, typer.Option(help="Unique in the fleet; a restart keeps it.")]
Host = Annotated[str, typer.Option(help="Where to listen.")]
AdvertisedHost = Annotated[str, typer.Option(help="The host as others reach it; needed with --host 0.0.0.0.")]
Port = Annotated[int, typer.Option(help="gRPC; 0 takes a free one.")]
MetricsPort = Annotated[int, typer.Option(help="/metrics, /health, /live; 0 takes a free one.")]
Redis = Annotated[str, typer.Option(help="redis://, rediss:// or unix://; where to register.")]
Device = Annotated[
    str | None, typer.Option(help="auto | cpu | cuda | cuda:N.", show_default="auto, a GPU if there is one")
]
GpuMemoryUtilization = Annotated[
    float | None, typer.Option(help="CUDA: part of the device's memory for this worker.", show_default="0.9")
]
LoadFormat = Annotated[str | None, typer.Option(help="auto (safetensors) | dummy (random weights, to measure speed).")]
Dtype = Annotated[str | None, typer.Option(help="auto | float32 | bfloat16 | float16: weights and KV.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens a KV block.", show_default="32; GPU: 64")]
NumBlocks = Annotated[int | None, typer.Option(help="Blocks in the pool; else from --kv-cache-bytes.")]
KvCacheBytes = Annotated[
    int | None, typer.Option(help="Size of the KV pool.", show_default="1 GiB; GPU: what memory is left")
]
HostKvBytes = Annotated[
    int | None,
    typer.Option(help="Host memory for the KV of preempted requests; 0: compute it again.", show_default="256 MiB"),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt and output together.")]
MaxNumSeqs = Annotated[int | None, typer.Option(help="Most requests in one step.", show_default="64; GPU: 1024")]
MaxNumBatchedTokens = Annotated[int | None, typer.Option(help="Token budget of a step.", show_default="512; GPU: 8192")]
ItlBudgetMs = Annotated[
    float | None,
    typer.Option(
        help="Steps that decode take prefill tokens only for so long; a decode worker that has a budget takes "
        "prompts while prefill workers are busy; 0: no limit.",
        show_default="0; decode on a GPU: 14",
    ),
]
NumThreads = Annotated[int | None, typer.Option(help="Compute threads.")]
Transfer = Annotated[
    str, typer.Option(help="auto | cuda_ipc, nccl (between GPUs) | shm (same host) | tcp | ucx: how KV moves.")
]
DataPort = Annotated[int, typer.Option(help="Where KV comes over tcp; 0 takes a free one.")]
DrainTimeout = Annotated[
    float, typer.Option(help="After SIGTERM, what runs may go on for so long; then it is resumed on another worker.")
]
TlsDir = Annotated[
    str, typer.Option(envvar="PDSERVE_TLS_DIR", help="tls.crt, tls.key, ca.crt for mutual TLS; empty: no TLS.")
]
OtlpEndpoint = Annotated[
    str, typer.Option(envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="Collector of traces (gRPC); empty: no traces.")
]
PrefixCaching = Annotated[
    bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Reuse KV of common prefixes.")
]


def engine_options(**given: str | int | float | bool | None) -> dict[str, str | int | float | bool | None]:
    """Leave out what was not given: the engine has its own defaults."""
    return {name: value for name, value in given.items() if value is not None}
