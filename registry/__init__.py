"""Who is in the fleet, as far as Redis knows (advisory)."""

from registry.record import WorkerLoad, WorkerRecord
from registry.workers import RegistryUnavailable, StaleIncarnation, WorkerRegistry

__all__ = ["RegistryUnavailable", "StaleIncarnation", "WorkerLoad", "WorkerRecord", "WorkerRegistry"]
