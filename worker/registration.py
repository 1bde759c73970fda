"""Tells Redis that this worker is there, again and again, as long as its engine is. Advisory: failures are logged once.

Each heartbeat is a full registration, so that a flushed or replaced Redis knows the worker again after one period.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from registry import RegistryUnavailable, StaleIncarnation, WorkerRecord, WorkerRegistry

HEARTBEAT_S = 1.0
TTL_S = 5.0

log = logging.getLogger(__name__)


class Registration:
    """``run`` it in a task, ``leave`` at the end."""

    def __init__(self, registry: WorkerRegistry, record: Callable[[], WorkerRecord | None]) -> None:
        """``record``: what to register now; None while the worker cannot take requests."""
        self._registry = registry
        self._record = record
        self._changed = asyncio.Event()
        self._registered: WorkerRecord | None = None
        self._is_down = False

    @property
    def incarnation(self) -> int:
        """The newest one that Redis has taken; 0 before the first. It stays when Redis is lost later: that is no reason
        to stop serving."""
        return 0 if self._registered is None else self._registered.incarnation

    def changed(self) -> None:
        """The record is another one now: do not wait for the next heartbeat."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            StaleIncarnation: a newer process has this worker's id; this one must stop serving.
        """
        while True:
            self._changed.clear()
            record = self._record()
            try:
                if record is not None:
                    await self._registry.register(record, TTL_S)
                elif self._registered is not None:
                    await self._registry.remove(self._registered.worker_id, self._registered.incarnation)
                self._registered = record
                self._note(None)
            except RegistryUnavailable as error:
                self._note(error)
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def leave(self) -> None:
        """Unregister, if Redis answers."""
        try:
            if self._registered is not None:
                await self._registry.remove(self._registered.worker_id, self._registered.incarnation)
        except (RegistryUnavailable, StaleIncarnation) as error:
            log.warning("not unregistered: %s", error)
        finally:
            await self._registry.close()

    def _note(self, error: RegistryUnavailable | None) -> None:
        if error is not None and not self._is_down:
            log.warning("registration fails, serving goes on: %s", error)
        if error is None and self._is_down:
            log.info("registration works again")
        self._is_down = error is not None
