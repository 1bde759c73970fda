"""How a worker leaves: it takes nothing new, finishes what has begun, and gives back what does not finish in time.

    SERVING --SIGTERM, `pdserve drain`--> DRAINING --nothing open-----------------------> DRAINED: the worker exits
                                             '--timeout--> GIVING_BACK --nothing open, 2 s--^
                                          a second signal: DRAINED at once

What is given back (at first what waits in the engine's queues, at the timeout everything) ends as aborted with the
tokens so far known to the router, which has it done elsewhere. What is open when the state is DRAINED is lost with its
session; routers resume that, too, when they have noticed.

Owns the state and the times; who is told what is the app's business (``begin``, ``give_back``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from enum import Enum
from typing import Any

import grpc

from pdserve.v1 import worker_pb2, worker_pb2_grpc

GIVE_BACK_S = 2.0
"""So long the engine may take to end everything: a step, and the frames."""
LOOK_S = 0.05
PROGRESS_S = 1.0

log = logging.getLogger(__name__)


class DrainState(Enum):
    SERVING = "serving"
    DRAINING = "draining"
    GIVING_BACK = "giving back"
    DRAINED = "drained"


class Drain:
    """``run`` it in a task: it ends when the worker may exit. ``ask`` for it, ``on_signal`` as a signal handler."""

    def __init__(
        self,
        timeout_s: float,
        *,
        num_open: Callable[[], int],
        begin: Callable[[], None],
        give_back: Callable[[], None],
    ) -> None:
        """``num_open``: requests that have not ended. ``begin``: take nothing new, hand back what waits."""
        self.state = DrainState.SERVING
        self._timeout_s = timeout_s
        self._num_open = num_open
        self._begin = begin
        self._give_back = give_back
        self._asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._deadline_s = 0.0

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self) -> None:
        """Begin, if it has not begun."""
        self._asked.set()

    def on_signal(self) -> None:
        """The first one begins, a second one ends it at once."""
        if self._asked.is_set():
            self._hurry.set()
        self._asked.set()

    async def run(self) -> None:
        """Waits until it is asked for, then goes through the states."""
        await self._asked.wait()
        self.state = DrainState.DRAINING
        self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        log.info("draining, for %.0f s at most; open requests: %d", self._timeout_s, self._num_open())
        self._begin()
        if not await self._until_idle(self._timeout_s):
            self.state = DrainState.GIVING_BACK
            log.warning("%.0f s are over; open requests that are given back: %d", self._timeout_s, self._num_open())
            self._give_back()
            if not await self._until_idle(GIVE_BACK_S):
                log.error("open requests that are lost with their sessions: %d", self._num_open())
        self.state = DrainState.DRAINED

    async def progress(self) -> AsyncIterator[worker_pb2.DrainProgress]:
        """What ``pdserve drain`` shows, until the end."""
        told_s, told = 0.0, -1
        loop = asyncio.get_running_loop()
        while self.state is not DrainState.DRAINED:
            if told != self._num_open() or loop.time() - told_s >= PROGRESS_S:
                told, told_s = self._num_open(), loop.time()
                left_s = max(0.0, self._deadline_s - told_s) if self._deadline_s else self._timeout_s
                yield worker_pb2.DrainProgress(open_requests=told, left_s=left_s)
            await asyncio.sleep(LOOK_S)
        yield worker_pb2.DrainProgress(open_requests=self._num_open(), drained=True)

    async def _until_idle(self, timeout_s: float) -> bool:
        """Whether nothing is open any more; also True when somebody is in a hurry."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self._num_open() and not self._hurry.is_set():
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                return False
            try:
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self._hurry.wait()
            except TimeoutError:
                continue
        return True


class AdminServicer(worker_pb2_grpc.WorkerAdminServicer):
    """What operators may ask of a worker."""

    def __init__(self, drain: Drain) -> None:
        self._drain = drain

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.DrainProgress]:
        self._drain.ask()
        async for progress in self._drain.progress():
            yield progress
