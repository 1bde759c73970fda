"""gRPC channels and servers with the one set of options that all processes share.

Owns message limits, keepalive, health and reflection. Does not reconnect: sessions make a new channel for each try, so
that backoff is theirs and a restarted peer is seen at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve import health
from pdserve.address import join_address
from pdserve.tls import SERVER_NAME, Tls
from pdserve.v1 import gateway_pb2, gateway_pb2_grpc, inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

MAX_MESSAGE_BYTES = 64 * 2**20
MAX_CONCURRENT_STREAMS = 4096

_LIMITS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Keeps middleboxes from dropping an idle connection. Liveness is the sessions' own heartbeat, not this.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]
CHANNEL_OPTIONS: list[tuple[str, int]] = [
    *_LIMITS,
    # A subchannel shared between channels would share its reconnect backoff with them, too.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_SERVER: list[tuple[str, int]] = [
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
]

Servicer = (
    inference_pb2_grpc.GenerationServicer
    | worker_pb2_grpc.KVHandoffServicer
    | worker_pb2_grpc.WorkerAdminServicer
    | gateway_pb2_grpc.InferenceServicer
)


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to ``host:port``; ``tls``: only to a server of this cluster. The caller closes it."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", SERVER_NAME)]
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


async def serve(
    servicers: Sequence[Servicer],
    host: str,
    port: int,
    *,
    is_ready: Callable[[], bool] | None = None,
    share_port: bool = False,
    tls: Tls | None = None,
) -> tuple[grpc.aio.Server, int]:
    """Start a server for ``servicers`` plus health and reflection; port 0 takes a free one.

    ``share_port``: other processes of ours listen on it, too. ``tls``: only clients of this cluster. ``is_ready`` is
    asked whenever somebody asks for the server's health; without it the server is always healthy.
    Returns the server, which the caller stops, and the bound port. Raises OSError when the port cannot be had.
    """
    # Not shared: a port in use is an error, not a silent second listener.
    server = grpc.aio.server(options=[*_SERVER, ("grpc.so_reuseport", int(share_port))])
    names = [_add(servicer, server) for servicer in servicers]
    health_servicer = health.HealthServicer(names, is_ready or (lambda: True))
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    try:
        at = join_address(host, port)
        bound_port = server.add_secure_port(at, tls.server_credentials()) if tls else server.add_insecure_port(at)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {host}:{port}; free the port or choose another with --port") from error
    await server.start()
    return server, bound_port


def _add(servicer: Servicer, server: grpc.aio.Server) -> str:
    """Register one servicer; returns its service's full name."""
    if isinstance(servicer, inference_pb2_grpc.GenerationServicer):
        inference_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
        return str(inference_pb2.DESCRIPTOR.services_by_name["Generation"].full_name)
    if isinstance(servicer, gateway_pb2_grpc.InferenceServicer):
        gateway_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
        return str(gateway_pb2.DESCRIPTOR.services_by_name["Inference"].full_name)
    if isinstance(servicer, worker_pb2_grpc.WorkerAdminServicer):
        worker_pb2_grpc.add_WorkerAdminServicer_to_server(servicer, server)
        return str(worker_pb2.DESCRIPTOR.services_by_name["WorkerAdmin"].full_name)
    worker_pb2_grpc.add_KVHandoffServicer_to_server(servicer, server)
    return str(worker_pb2.DESCRIPTOR.services_by_name["KVHandoff"].full_name)
