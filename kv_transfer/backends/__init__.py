"""The registry of transfer backends: a new one is a file here and a line in the dict."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kv_transfer.backends.base import Backend
from kv_transfer.backends.socket_channel import SocketSettings

BACKENDS = {
    "cuda_ipc": "kv_transfer.backends.cuda_ipc:CudaIpcBackend",
    "nccl": "kv_transfer.backends.nccl:NcclBackend",
    "shm": "kv_transfer.backends.shm:ShmBackend",
    "ucx": "kv_transfer.backends.ucx:UcxBackend",
    "tcp": "kv_transfer.backends.tcp:TcpBackend",
}
"""Best first."""
OF_DEVICES = ("cuda_ipc", "nccl")
"""Between GPUs only."""
ANYWHERE = ("ucx",)
"""Wherever the engine's memory is."""
AUTO = "auto"


def load(name: str, device: str = "cpu", data_port: int = 0) -> Backend:
    """``device``: the engine's. ``data_port``: where a receiver of tcp listens; 0: at a free one.

    Raises:
        ValueError: no such backend, or not for this device; names those that there are.
    """
    try:
        module, _, attribute = BACKENDS[name].partition(":")
    except KeyError:
        raise ValueError(f"transfer backend {name!r} is not known: use one of {', '.join(BACKENDS)}") from None
    make = getattr(import_module(module), attribute)
    if name == "tcp":
        backend: Backend = make(SocketSettings(port=data_port))
    else:
        backend = make(device) if name in OF_DEVICES + ANYWHERE else make()
    return backend


def load_all(transfer: str, device: str = "cpu", data_port: int = 0) -> dict[str, Backend]:
    """What ``--transfer`` names, best first: one backend, or with "auto" all that this machine gains from.

    Between hosts without RDMA devices, ucx moves its bytes over TCP too, and costs a second to load: tcp does for them.

    Raises:
        ValueError: no such backend, or not for this device.
    """
    names = [transfer]
    if transfer == AUTO:
        names = [name for name in BACKENDS if _is_gain(name, device.partition(":")[0])]
    return {name: load(name, device, data_port) for name in names}


def has_rdma() -> bool:
    return any(Path("/sys/class/infiniband").glob("*"))


def _is_gain(name: str, device_type: str) -> bool:
    if name in OF_DEVICES:  # what nccl reaches beyond cuda_ipc are other hosts, which was never measured
        return name == "cuda_ipc" and device_type == "cuda"
    return name != "ucx" or (device_type == "cpu" and has_rdma() and find_spec("ucxx") is not None)
