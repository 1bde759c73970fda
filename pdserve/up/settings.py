"""What ``pdserve up`` can be asked for. From flags, or from a YAML file with the same names (flags win)."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from pdserve.up.errors import UpError


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """Every field is a flag of the same name. None: the default of the process that it is passed to."""

    prefill: int = 1
    """Prefill workers."""
    decode: int = 1
    """Decode workers."""
    aggregated: bool = False
    """No prefill workers; the decode workers prefill by themselves."""
    model: str | None = None
    """Directory, hub name, or None for the default model."""
    served_model_name: str | None = None
    dtype: str = "auto"
    host: str = "127.0.0.1"
    """Of the gateway; everything else listens on 127.0.0.1 only."""
    port: int = 8000
    grpc_port: int | None = None
    """Of the gateway, for the SDK. None: the one after ``port``."""
    redis: str | None = None
    """URL of a Redis that runs already; None: start our own."""
    policy: str | None = None
    max_queue_s: float | None = None
    """Requests that would wait longer for their prefill are refused. None: those that would miss their deadline."""
    local_prefill_tokens: int | None = None
    load_format: str | None = None
    max_num_batched_tokens: int | None = None
    """Of a step of each worker."""
    itl_budget_ms: float | None = None
    """Of the workers that decode. None: 14 for decode workers on a GPU, else 0 (no limit)."""
    max_model_len: int | None = None
    device: str = "auto"
    """auto | cpu | cuda (workers are spread over the GPUs) | cuda:N (all on that one)."""
    gpu_memory_utilization: float = 0.9
    """Part of a GPU's memory for all workers on it together."""
    kv_cache_bytes: int | None = None
    """Of each worker. None: 1 GiB on a CPU; on a GPU what memory is left."""
    num_threads: int | None = None
    transfer: str | None = None
    """How KV moves between the workers."""
    start_timeout_s: float = 300.0
    chat: bool = True
    """One chat when everything is ready."""
    prompt: str = "In one sentence, what is a lighthouse?"
    once: bool = False
    """Stop after the first chat."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if getattr(self, name) < 1:
                raise UpError(f"{name}={getattr(self, name)}: at least 1 is needed (--aggregated runs without prefill)")
        if self.aggregated and self.prefill > 1:
            raise UpError(f"aggregated runs no prefill workers, and prefill={self.prefill}: leave one of them out")
        if not 0 < self.start_timeout_s < math.inf:
            raise UpError(f"start_timeout_s={self.start_timeout_s}: use seconds, or leave --start-timeout-s out")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise UpError(f"device={self.device!r} is not known: use auto, cpu, cuda or cuda:N")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise UpError(f"gpu_memory_utilization={self.gpu_memory_utilization} must be above 0 and at most 1")
        for name, port in (("port", self.port), ("grpc_port", self.sdk_port)):
            if not 1 <= port <= 65535:
                raise UpError(f"{name}={port} is not a port: use 1 to 65535")
        if self.port == self.sdk_port:
            raise UpError(f"port and grpc_port are both {self.port}: give each its own")
        if self.once and not self.chat:
            raise UpError("once and no-chat together do nothing: leave one of them out")
        if self.redis is not None and not self.redis.startswith(("redis://", "rediss://", "unix://")):
            raise UpError(f"redis={self.redis!r} is not a URL: use redis://host:port or unix:///path")

    @property
    def sdk_port(self) -> int:
        """Where the gateway's gRPC server listens."""
        return self.port + 1 if self.grpc_port is None else self.grpc_port

    @property
    def num_engines(self) -> int:
        """Processes that hold the model."""
        return self.decode + (0 if self.aggregated else self.prefill)


def load_settings(path: Path | None, flags: dict[str, Any]) -> UpSettings:
    """Settings from ``path`` (YAML, may be None) overridden by ``flags`` (those that the user gave).

    Raises: UpError, naming the key that is unknown or of the wrong type.
    """
    values = {**(_read_yaml(path) if path else {}), **flags}
    return UpSettings(**values)


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        values = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise UpError(f"{path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise UpError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise UpError(f"{path} must hold `name: value` lines")
    known = get_type_hints(UpSettings)
    values = {str(key).replace("-", "_"): value for key, value in values.items()}
    for key, value in values.items():
        if key not in known:
            names = ", ".join(field.name for field in dataclasses.fields(UpSettings))
            raise UpError(f"{path}: unknown key {key!r}; known are {names}")
        if isinstance(value, bool) is not (known[key] is bool) or not isinstance(value, _accepted(known[key])):
            wanted = getattr(known[key], "__name__", str(known[key]))
            raise UpError(f"{path}: {key} must be {wanted}, not {value!r}")
    return values


def _accepted(hint: Any) -> Any:
    """A float may be written without its point."""
    return hint | int if hint in (float, float | None) else hint
