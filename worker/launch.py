"""What a service tells its engine process on the command line, and what each side makes of it.

One JSON argument, so that both sides read the same typed value. Torch-free.
"""

from __future__ import annotations

import msgspec

from pdserve.v1 import kv_pb2


class EngineLaunch(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine process needs to know at start."""

    engine_options: dict[str, str | int | float | bool | None]
    """Fields of EngineConfig that were given; the engine process checks them."""
    to_engine: str
    """ipc:// address that the service pushes to."""
    from_engine: str
    """ipc:// address that the service pulls from."""
    parent_pid: int
    role: str
    worker_id: str
    incarnation: int
    address: str
    """host:port of the service's gRPC server."""
    host: str
    """Where the engine listens, if it does (decode: for KV segments)."""
    advertised_host: str
    """The same host as others reach it."""
    transfer: str = "auto"
    """Backend for KV segments (kv_transfer.backends), or auto."""
    data_port: int = 0
    """Where the engine listens for KV segments over tcp; 0: at a free one."""
    log_level: str = "info"

    def identity(self) -> kv_pb2.WorkerIdentity:
        return kv_pb2.WorkerIdentity(
            worker_id=self.worker_id, incarnation=self.incarnation, role=self.role, address=self.address
        )


def encode_launch(launch: EngineLaunch) -> str:
    return msgspec.json.encode(launch).decode()


def decode_launch(argument: str) -> EngineLaunch:
    """Raises:
    msgspec.ValidationError: not what ``encode_launch`` made.
    """
    return msgspec.json.decode(argument, type=EngineLaunch)
