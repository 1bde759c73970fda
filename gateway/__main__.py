"""``python -m gateway``: reads the settings, loads tokenizer and template, serves HTTP and gRPC."""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
from collections.abc import Iterator
from typing import Annotated

import structlog
import typer

from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.model import load_model
from gateway.processes import run_processes
from gateway.server import CLOSE_S, GatewayServer
from pdserve.model_store import ModelUnavailableError, name_in_api, resolve_model
from telemetry import logs

BACKLOG = 2048
MAX_OPEN_FILES = 1 << 20
PEER_STALL_TIMEOUT_MS = 60_000
"""The kernel drops a connection whose peer takes nothing for so long."""

log = structlog.get_logger()


def main(
    model: Annotated[str, typer.Option(help="Model directory or name.")],
    router: Annotated[str, typer.Option(help="HOST:PORT of each router, with commas between them.")],
    served_model_name: Annotated[
        str | None, typer.Option(help="The name that clients use.", show_default="the hub name, or the directory's")
    ] = None,
    host: Annotated[str, typer.Option()] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one; the ready line names it.")] = 8000,
    grpc_port: Annotated[int | None, typer.Option(help="Of the SDK's service.", show_default="--port + 1")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt + output, in tokens.")] = None,
    default_timeout_s: Annotated[float, typer.Option(help="Deadline of requests that bring none.")] = 600.0,
    max_requests: Annotated[int, typer.Option(help="Requests at a time; more are answered 429.")] = 4096,
    workers: Annotated[int, typer.Option(help="Processes that share the ports; limits are of each.", min=1)] = 1,
    own_ports: Annotated[
        int | None,
        typer.Option(
            help="With --workers: the first of as many HTTP ports, one of each process, for its own /metrics."
        ),
    ] = None,
    lame_duck_s: Annotated[
        float, typer.Option(help="After SIGTERM, not ready but still serving for so long, until clients have noticed.")
    ] = 0.0,
    drain_timeout_s: Annotated[float, typer.Option(help="After SIGTERM, what runs may go on for so long.")] = 60.0,
    share_ports: Annotated[bool, typer.Option("--share-ports", hidden=True)] = False,
    tls_dir: Annotated[
        str,
        typer.Option(
            envvar="PDSERVE_TLS_DIR", help="tls.crt, tls.key, ca.crt for mutual TLS with routers; empty: no TLS."
        ),
    ] = "",
    otlp_endpoint: Annotated[
        str, typer.Option(envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="Collector of traces (gRPC); empty: no traces.")
    ] = "",
    trace_sample_ratio: Annotated[
        float, typer.Option(envvar="OTEL_TRACES_SAMPLER_ARG", help="Share of requests that are traced, 0 to 1.")
    ] = 1.0,
) -> None:
    """Serve the OpenAI API for one model."""
    logs.set_up("gateway")
    allow_connections()
    try:
        config = GatewayConfig(
            model=model,
            served_model_name=served_model_name or name_in_api(model),
            routers=tuple(address.strip() for address in router.split(",") if address.strip()),
            host=host,
            port=port,
            grpc_port=grpc_port,
            max_model_len=max_model_len,
            default_timeout_s=default_timeout_s,
            max_requests=max_requests,
            tls_dir=tls_dir,
            lame_duck_s=lame_duck_s,
            drain_timeout_s=drain_timeout_s,
            otlp_endpoint=otlp_endpoint,
            trace_sample_ratio=trace_sample_ratio,
            share_ports=share_ports,
            own_port=own_ports,
        )
        if own_ports is not None and not 0 < own_ports <= 65536 - workers:
            raise ValueError(f"--own-ports {own_ports} with {workers} workers: use ports between 1 and 65535")
        if workers > 1:
            stop_s = drain_timeout_s + 2 * CLOSE_S + 2.0
            sys.exit(run_processes(workers, host, port, config.bound_grpc_port, own_ports, stop_s))
        served = load_model(resolve_model(config.model), config.served_model_name, config.max_model_len)
        with contextlib.ExitStack() as stack:
            listeners = [stack.enter_context(listening(config.host, config.port, share=config.share_ports))]
            if config.own_port is not None:
                listeners.append(stack.enter_context(listening(config.host, config.own_port)))
            GatewayServer(create_app(config, served), config).run(sockets=listeners)
    except (ValueError, OSError, ModelUnavailableError) as error:
        log.error("cannot start", reason=str(error))
        sys.exit(1)


def allow_connections() -> None:
    """Raise the soft limit of open files, mostly 1024, as far as this process may: each client's connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def listening(host: str, port: int, *, share: bool = False) -> Iterator[socket.socket]:
    """A listening socket; ``share``: others bind it, too. Raises OSError, with the remedy, when it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, PEER_STALL_TIMEOUT_MS)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except OSError as error:
            raise OSError(f"cannot listen on {host}:{port} ({error.strerror}): choose another --port") from error
        yield listener


if __name__ == "__main__":
    typer.run(main)
