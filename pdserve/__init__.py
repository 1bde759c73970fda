"""The public face of pdserve: client SDK, CLI, generated stubs, sessions, channels. Imports nothing else of ours.

``import pdserve`` is quick: the client, and grpc with it, is loaded when it is first named.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.async_client import AsyncClient, AsyncStream
    from pdserve.client import Client, Stream
    from pdserve.errors import (
        ConnectionFailedError,
        ContextLengthError,
        DeadlineExceededError,
        InternalError,
        InvalidRequestError,
        ModelNotFoundError,
        OverloadedError,
        PdserveError,
        RequestCancelledError,
        SlowConsumerError,
        UnavailableError,
    )
    from pdserve.results import Choice, Chunk, Generation, Load, ModelInfo, TokenLogprob, Usage

__version__ = "0.1.0"
__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Choice",
    "Chunk",
    "Client",
    "ConnectionFailedError",
    "ContextLengthError",
    "DeadlineExceededError",
    "Generation",
    "InternalError",
    "InvalidRequestError",
    "Load",
    "ModelInfo",
    "ModelNotFoundError",
    "OverloadedError",
    "PdserveError",
    "RequestCancelledError",
    "SlowConsumerError",
    "Stream",
    "TokenLogprob",
    "UnavailableError",
    "Usage",
]

_CLIENTS = {"AsyncClient": "async_client", "AsyncStream": "async_client", "Client": "client", "Stream": "client"}
_RESULTS = ("Choice", "Chunk", "Generation", "Load", "ModelInfo", "TokenLogprob", "Usage")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pdserve' has no attribute {name!r}")
    module = _CLIENTS.get(name) or ("results" if name in _RESULTS else "errors")
    return getattr(importlib.import_module(f"pdserve.{module}"), name)
