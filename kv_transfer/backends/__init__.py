"""The registry of transfer backends: a new one is a file here and a line in the dict."""

from __future__ import annotations

from importlib import import_module

from kv_transfer.backends.base import Backend

BACKENDS = {
    "tcp": "kv_transfer.backends.tcp:TcpBackend",
}
"""Best first."""


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
