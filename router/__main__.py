"""``python -m router``: the command line of a router."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
import uvloop

from router.app import Router
from router.config import DEFAULT_LOCAL_PREFILL_TOKENS, RouterConfig
from router.policies import DEFAULT_POLICY, POLICIES
from telemetry import logs


def main(
    redis: Annotated[str, typer.Option(help="redis://host:port, rediss://... or unix:///path")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="gRPC port; 0: a free one")] = 0,
    metrics_port: Annotated[int, typer.Option(help="HTTP port of /metrics, /health, /live; 0: a free one")] = 0,
    router_id: Annotated[str, typer.Option(help="name of this router; empty: from host and process id")] = "",
    policy: Annotated[str, typer.Option(help=", ".join(sorted(POLICIES)))] = DEFAULT_POLICY,
    local_prefill_tokens: Annotated[
        int, typer.Option(help="prompts with fewer uncached tokens skip the prefill workers; 0: none ever does")
    ] = DEFAULT_LOCAL_PREFILL_TOKENS,
    max_open_requests: Annotated[int, typer.Option(help="more are refused as overloaded")] = 4096,
    max_queued_tokens: Annotated[
        int, typer.Option(help="prompt tokens that may wait at one worker; beyond that, overloaded; 0: no limit")
    ] = 0,
    max_queue_s: Annotated[
        float, typer.Option(help="requests that would wait longer are refused as overloaded; 0: than their deadline")
    ] = 0.0,
    max_attempts: Annotated[int, typer.Option(help="pairs of workers that one request may try")] = 3,
    no_worker_wait_s: Annotated[float, typer.Option(help="how long a request waits for a worker to appear")] = 5.0,
    poll_interval_s: Annotated[float, typer.Option(help="between two looks at the registry")] = 0.5,
    drain_timeout_s: Annotated[float, typer.Option(help="after SIGTERM, what runs may go on for so long")] = 10.0,
    min_prefill_workers: Annotated[int, typer.Option(help="not ready before so many were reached")] = 0,
    min_decode_workers: Annotated[int, typer.Option(help="not ready before so many were reached")] = 1,
    tls_dir: Annotated[
        str, typer.Option(envvar="PDSERVE_TLS_DIR", help="tls.crt, tls.key, ca.crt for mutual TLS; empty: no TLS")
    ] = "",
    otlp_endpoint: Annotated[
        str, typer.Option(envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="collector of traces (gRPC); empty: no traces")
    ] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error")] = "info",
) -> None:
    """Route requests of gateways to pairs of prefill and decode workers."""
    try:
        logs.set_up("router", level=log_level)
        config = RouterConfig(
            redis_url=redis,
            host=host,
            port=port,
            metrics_port=metrics_port,
            router_id=router_id,
            policy=policy,
            local_prefill_tokens=local_prefill_tokens,
            max_open_requests=max_open_requests,
            max_queued_tokens=max_queued_tokens,
            max_queue_s=max_queue_s,
            max_attempts=max_attempts,
            no_worker_wait_s=no_worker_wait_s,
            poll_interval_s=poll_interval_s,
            drain_timeout_s=drain_timeout_s,
            min_prefill_workers=min_prefill_workers,
            min_decode_workers=min_decode_workers,
            tls_dir=tls_dir,
            otlp_endpoint=otlp_endpoint,
        )
        uvloop.run(_run(config))
    except (ValueError, OSError) as error:
        sys.exit(f"router: {error}")


async def _run(config: RouterConfig) -> None:
    await Router(config).run_until_signal()


if __name__ == "__main__":
    typer.run(main)
