"""The registry of transfer backends: a new one is a file here and a line in the dict."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from kv_transfer.backends.base import Backend

BACKENDS = {
    "shm": "kv_transfer.backends.shm:ShmBackend",
    "ucx": "kv_transfer.backends.ucx:UcxBackend",
    "tcp": "kv_transfer.backends.tcp:TcpBackend",
}
"""Best first."""
AUTO = "auto"


def load(name: str) -> Backend:
    """Raises:
    ValueError: no such backend; names those that there are.
    """
    try:
        module, _, attribute = BACKENDS[name].partition(":")
    except KeyError:
        raise ValueError(f"transfer backend {name!r} is not known: use one of {', '.join(BACKENDS)}") from None
    backend: Backend = getattr(import_module(module), attribute)()
    return backend


def load_all(transfer: str) -> dict[str, Backend]:
    """What ``--transfer`` names, best first: one backend, or with "auto" all that this machine gains from.

    Between hosts without RDMA devices, ucx moves its bytes over TCP too, and costs a second to load: tcp does for them.

    Raises:
        ValueError: no such backend; names those that there are.
    """
    names = [transfer]
    if transfer == AUTO:
        names = [name for name in BACKENDS if name != "ucx" or (has_rdma() and find_spec("ucxx"))]
    return {name: load(name) for name in names}


def has_rdma() -> bool:
    return any(Path("/sys/class/infiniband").glob("*"))
