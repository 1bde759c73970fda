"""HOST:PORT, as gRPC and URLs write it, and what is a port. Imports nothing."""

from __future__ import annotations


def join_address(host: str, port: int) -> str:
    """IPv6 addresses get brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def is_address(text: str) -> bool:
    """HOST:PORT with a port that there is: gRPC would connect to the port modulo 65536."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) <= 65535


def check_listen_port(flag: str, port: int) -> None:
    """Raises ValueError, naming ``flag``. gRPC would listen at the port modulo 65536 and say nothing."""
    if not 0 <= port <= 65535:
        raise ValueError(f"{flag} {port} is not a port: use 1 to 65535, or 0 for a free one")
