"""URLs of Redis as they may be shown. Imports nothing."""

from __future__ import annotations


def without_password(url: str) -> str:
    """For logs and messages."""
    scheme, found, rest = url.partition("://")
    _, at, host = rest.rpartition("@")
    return f"{scheme}{found}***@{host}" if at else url
