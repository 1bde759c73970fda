"""All children: started together, watched, restarted, stopped.

Owns the processes and their states; not what they are (``plan``) nor how it looks on the terminal (``run``).

    STARTING --healthy--> READY --exit--> BACKOFF --delay--> STARTING ...
       |                                     ^
       +--exit while the cluster starts: FAILED, which ends ``start()``; later: +
A restart is a new process with the same command line; it names itself a new incarnation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum

from pdserve.up.child import Child, ChildSpec, describe_exit, last_words
from pdserve.up.errors import UpError

_POLL_S = 0.05
_FIRST_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0
_STABLE_AFTER_S = 60.0  # ran this long: the next restart starts again from the first backoff
_STOP_TIMEOUT_S = 10.0


class ChildState(Enum):
    STARTING = "starting"
    READY = "ready"
    BACKOFF = "restarting"
    FAILED = "failed"


class Supervisor:
    """Runs ``specs``. ``on_change(name, state, text)``, replaceable, is called when a child's state changes."""

    def __init__(
        self, specs: list[ChildSpec], on_change: Callable[[str, ChildState, str], None] = lambda name, state, text: None
    ) -> None:
        self._specs = specs
        self.on_change = on_change
        self.states: dict[str, tuple[ChildState, str]] = {spec.name: (ChildState.STARTING, "") for spec in specs}
        self._children: dict[str, Child] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._started = False  # start-up is over: from now on, the dead are restarted
        self._ready: dict[str, asyncio.Event] = {spec.name: asyncio.Event() for spec in specs}
        self._start_failed: asyncio.Future[None] | None = None

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._children.items()}

    async def start(self, timeout_s: float) -> None:
        """Start all at once and wait until every one is healthy.

        Raises: UpError, naming the child that died or is not ready in time, and its log file.
        """
        failed = self._start_failed = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._keep(spec), name=spec.name) for spec in self._specs]
        all_ready = asyncio.create_task(self._wait_until_ready())
        try:
            await asyncio.wait({all_ready, failed}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            all_ready.cancel()
        if failed.done():
            failed.result()
        late = [spec for spec in self._specs if not self._ready[spec.name].is_set()]
        if late:
            logs = ", ".join(f"{spec.name} ({spec.log})" for spec in late)
            why = next((f", which says: {words}" for spec in late if (words := last_words(spec.log))), "")
            raise UpError(f"not ready within {timeout_s:.0f} s: {logs}{why}; read the log or raise --start-timeout-s")
        self._started = True

    async def stop(self) -> int:
        """End every child, in the reverse of the order of ``specs``; the number that were running."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        running = [self._children[spec.name] for spec in reversed(self._specs) if spec.name in self._children]
        # The first of the specs (Redis) goes last, so that the others can still sign off.
        await asyncio.gather(*(child.stop(_STOP_TIMEOUT_S) for child in running if child.spec is not self._specs[0]))
        await asyncio.gather(*(child.stop(_STOP_TIMEOUT_S) for child in running if child.spec is self._specs[0]))
        self._children.clear()
        return len(running)

    def kill(self) -> None:
        """End every child now; for the second Ctrl-C."""
        for child in self._children.values():
            child.kill()

    async def _keep(self, spec: ChildSpec) -> None:
        """Run one child for ever; returns only when it dies while the cluster starts."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            started_s = time.monotonic()
            self._changed(spec.name, ChildState.STARTING, "")
            ending = await self._run_once(spec, started_s)
            if not self._started:
                self._fail(spec, ending)
                return
            if time.monotonic() - started_s > _STABLE_AFTER_S:
                backoff_s = _FIRST_BACKOFF_S
            self._changed(spec.name, ChildState.BACKOFF, f"{ending}; again in {backoff_s:g} s; log: {spec.log}")
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    async def _wait_until_ready(self) -> None:
        for event in self._ready.values():
            await event.wait()

    async def _run_once(self, spec: ChildSpec, started_s: float) -> str:
        """Start the child and wait until it ends; how it ended, in words."""
        try:
            child = self._children[spec.name] = await Child.spawn(spec)
        except OSError as error:
            return f"cannot be started ({error.strerror})"
        status = await self._watch(child, started_s)
        self._children.pop(spec.name, None)
        child.kill()  # whatever it had started goes with it
        return describe_exit(status)

    async def _watch(self, child: Child, started_s: float) -> int:
        """Wait until the child exits, saying when it is ready; its exit status."""
        exited = asyncio.create_task(child.wait())
        try:
            while not exited.done() and not await child.spec.is_healthy():
                await asyncio.wait({exited}, timeout=_POLL_S)
            if not exited.done():
                self._ready[child.spec.name].set()
                self._changed(child.spec.name, ChildState.READY, f"{time.monotonic() - started_s:.1f} s")
            return await exited
        finally:
            exited.cancel()

    def _fail(self, spec: ChildSpec, ending: str) -> None:
        self._changed(spec.name, ChildState.FAILED, ending)
        if self._start_failed is not None and not self._start_failed.done():
            reason = last_words(spec.log)
            why = f": {reason}" if reason else ""
            self._start_failed.set_exception(UpError(f"{spec.name} {ending} while starting{why}; its log: {spec.log}"))

    def _changed(self, name: str, state: ChildState, text: str) -> None:
        self.states[name] = (state, text)
        self.on_change(name, state, text)
