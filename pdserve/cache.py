"""Where our files lie: ``$PDSERVE_CACHE``, else ``~/.cache/pdserve``; in it ``models/`` and ``runs/``.

Owns the names in it that more than one command knows; what the models are is ``model_store``'s.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

_REDIS_URL = "redis.url"
"""In the log directory of a run of ``up``, while it lasts."""


def cache_dir() -> Path:
    """The cache directory; it need not exist."""
    configured = os.environ.get("PDSERVE_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "pdserve"


def runs_dir() -> Path:
    """A log directory for each run of ``up``: DATE-TIME-PID."""
    return cache_dir() / "runs"


def note_cluster(logs: Path, redis_url: str) -> None:
    """A cluster starts; ``running_clusters`` finds it."""
    path = logs / _REDIS_URL
    path.touch(mode=0o600)  # the URL may hold a password
    path.write_text(redis_url)


def forget_cluster(logs: Path) -> None:
    (logs / _REDIS_URL).unlink(missing_ok=True)


def running_clusters() -> list[str]:
    """URLs of the Redis of each cluster that ``up`` runs here for this user."""
    files = sorted(runs_dir().glob(f"*-*-[0-9]*/{_REDIS_URL}"))
    return [file.read_text() for file in files if psutil.pid_exists(int(file.parent.name.rpartition("-")[2]))]
