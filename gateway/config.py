"""Settings of one gateway, read once in ``__main__``. What is measured or read from the model lives in ``model.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.address import check_listen_port, is_address


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Every limit has its unit in its name; a wrong value is an error that names the remedy."""

    model: str
    """Model directory, or a name that ``pdserve.model_store`` resolves."""
    served_model_name: str
    routers: tuple[str, ...]
    """host:port of each router; the first alive one that has workers is used."""
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    """Of the SDK's service. None: the one after ``port``, or a free one where that is 0."""
    max_model_len: int | None = None
    """None: what the model's config says."""
    default_timeout_s: float = 600.0
    """Deadline of a request that brings none."""
    max_timeout_s: float = 3600.0
    """Longest deadline a request may ask for."""
    max_requests: int = 4096
    """HTTP requests that generate or tokenize at the same time; more are answered 429."""
    max_choices: int = 128
    """Prompts x n of one HTTP request."""
    max_body_bytes: int = 16 << 20
    max_stream_buffer_bytes: int = 256 << 10
    """Bytes of one stream that its client has not read; then its outputs wait in the session's buffer."""
    stall_timeout_s: float = 10.0
    """A client that takes nothing of a full buffer for so long is ended as slow_consumer."""
    send_timeout_s: float = 30.0
    """How long a client may take to read what is left once its request has ended."""
    router_wait_s: float = 5.0
    """How long a request waits for a router session to come (back)."""
    max_resumes: int = 3
    """How often one choice is taken up again, on this or another router, after its session was lost."""
    recent_requests: int = 1024
    """Finished requests kept for /debug/requests."""
    tokenizer_threads: int = 2
    share_ports: bool = False
    """Other gateway processes listen on the same ports."""
    own_port: int | None = None
    """A second HTTP port, of this process alone."""
    tls_dir: str = ""
    """Certificate, key and authority for the links to routers; empty: no TLS."""
    lame_duck_s: float = 0.0
    """After SIGTERM the gateway says that it is not ready, and still takes requests for so long: until whoever sends
    them has noticed."""
    drain_timeout_s: float = 60.0
    """What runs so long after SIGTERM is cut off."""
    otlp_endpoint: str = ""
    """Collector of traces; empty: no traces."""
    trace_sample_ratio: float = 1.0
    """Share of the requests without a trace context of the client's that are traced."""

    @property
    def bound_grpc_port(self) -> int:
        if self.grpc_port is not None:
            return self.grpc_port
        return self.port + 1 if self.port else 0

    def __post_init__(self) -> None:
        check_listen_port("--port", self.port)
        check_listen_port("--grpc-port", self.bound_grpc_port)
        if not self.routers:
            raise ValueError("no router given: use --router HOST:PORT[,HOST:PORT]")
        for address in self.routers:
            if not is_address(address):
                raise ValueError(f"router address {address!r} is not HOST:PORT: use --router 127.0.0.1:PORT")
        if not 0 < self.default_timeout_s <= self.max_timeout_s:
            raise ValueError(
                f"default_timeout_s={self.default_timeout_s} must be above 0 and at most {self.max_timeout_s}: "
                "use --default-timeout-s 600"
            )
        if not self.drain_timeout_s < math.inf:
            raise ValueError(f"drain_timeout_s={self.drain_timeout_s} must not be infinite: use --drain-timeout-s 60")
        if not 0 <= self.lame_duck_s <= self.drain_timeout_s:
            raise ValueError(
                f"lame_duck_s={self.lame_duck_s} must be between 0 and drain_timeout_s={self.drain_timeout_s}, "
                "of which it is a part: lower --lame-duck-s"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len} must be at least 2: leave --max-model-len out")
        for name in ("max_requests", "max_choices", "max_body_bytes", "max_stream_buffer_bytes", "tokenizer_threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
