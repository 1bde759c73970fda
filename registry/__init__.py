"""Who is in the fleet, and who owns which prefix, as far as Redis knows (advisory)."""

from registry.connection import RegistryUnavailable
from registry.record import WorkerLoad, WorkerRecord
from registry.workers import StaleIncarnation, WorkerRegistry

__all__ = ["RegistryUnavailable", "StaleIncarnation", "WorkerLoad", "WorkerRecord", "WorkerRegistry"]
