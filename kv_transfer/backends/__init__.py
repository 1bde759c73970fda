"""The registry of transfer backends: a new one is a file here and a line in the dict."""

from __future__ import annotations

from importlib import import_module

from kv_transfer.backends.base import Backend

BACKENDS = {
    "shm": "kv_transfer.backends.shm:ShmBackend",
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

    Raises:
        ValueError: no such backend; names those that there are.
    """
    names = ["shm", "tcp"] if transfer == AUTO else [transfer]
    return {name: load(name) for name in names}
