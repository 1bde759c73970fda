"""HOST:PORT, as gRPC and URLs write it. Imports nothing."""

from __future__ import annotations


def join_address(host: str, port: int) -> str:
    """IPv6 addresses get brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
