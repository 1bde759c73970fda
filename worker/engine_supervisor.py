"""Keeps one engine alive: starts it, passes its messages on, and starts a new incarnation when it is lost.

    STARTING --ready--> RUNNING --lost--> backoff --> STARTING ...    (first start fails: the service ends, saying why)

The listener is told of every change. It ends what the lost incarnation owned before the next one is started.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec

from engine.messages import EngineReady, PeerFrame, StepOutputs, ToEngine
from pdserve.identity import new_identity
from worker.engine_client import EngineClient, EngineLost
from worker.launch import EngineLaunch

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 15.0
HEALTHY_AFTER_S = 60.0

log = logging.getLogger(__name__)


class EngineListener(Protocol):
    """Whoever uses the engine. Called on the event loop; must not block."""

    def new_incarnation(self, launch: EngineLaunch) -> None:
        """From now on this worker is this incarnation; its engine is about to be started."""

    def engine_ready(self, ready: EngineReady) -> None: ...

    def engine_said(self, message: StepOutputs | PeerFrame) -> None: ...

    def engine_lost(self, reason: str) -> None: ...


class EngineSupervisor:
    """``run`` it in a task; ``send`` to whatever engine there is."""

    def __init__(self, module: str, listener: EngineListener, *, silence_s: float) -> None:
        self.ready: EngineReady | None = None
        """What the running engine said of itself; None while there is none."""
        self._module = module
        self._listener = listener
        self._silence_s = silence_s
        self._client: EngineClient | None = None

    def send(self, message: ToEngine) -> bool:
        """False when there is no engine that takes it."""
        return self._client is not None and self.ready is not None and self._client.send(message)

    async def run(self, launch: EngineLaunch) -> None:
        """Until cancelled. ``launch`` is the first incarnation's.

        Raises:
            EngineLost: the first start failed. A setting is wrong; trying again would not help.
        """
        backoff_s = FIRST_BACKOFF_S
        was_ready = False
        loop = asyncio.get_running_loop()
        self._listener.new_incarnation(launch)
        while True:
            started_s = loop.time()
            try:
                await self._live(launch)
            except EngineLost as error:
                was_ready = was_ready or self.ready is not None
                self.ready = None
                if not was_ready:
                    raise
                log.error("engine of incarnation %d is lost: %s", launch.incarnation, error)
                # First who we are, then that we left: whoever comes back at once meets the new incarnation.
                launch = _next_incarnation(launch)
                self._listener.new_incarnation(launch)
                self._listener.engine_lost(str(error))
            finally:
                client, self._client, self.ready = self._client, None, None
                if client is not None:
                    await client.stop()
            backoff_s = FIRST_BACKOFF_S if loop.time() - started_s > HEALTHY_AFTER_S else backoff_s
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _live(self, launch: EngineLaunch) -> None:
        self._client = EngineClient(self._module, launch, silence_s=self._silence_s)
        self.ready = await self._client.start()
        self._listener.engine_ready(self.ready)
        async for message in self._client.messages():
            self._listener.engine_said(message)


def _next_incarnation(launch: EngineLaunch) -> EngineLaunch:
    """A newer one, even if the wall clock went back."""
    fresh = new_identity(launch.role, launch.worker_id)
    return msgspec.structs.replace(launch, incarnation=max(fresh.incarnation, launch.incarnation + 1))
