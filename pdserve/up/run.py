"""The order of things in ``pdserve up``: check, start, first chat, stay, stop.

Imports for the terminal (rich, httpx) come late: while the children load, not before they are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.address import join_address
from pdserve.cache import cache_dir, forget_cluster, note_cluster
from pdserve.model_store import ModelUnavailableError, resolve_model
from pdserve.redis_server import RedisMissingError, redis_binary
from pdserve.up.errors import UpError
from pdserve.up.plan import plan_cluster, reachable_host, redis_url_of, served_model_name
from pdserve.up.preflight import check_memory, check_platform, check_port, make_directories
from pdserve.up.settings import UpSettings
from pdserve.up.supervisor import Supervisor
from pdserve.up.user_redis import check_is_ours

if TYPE_CHECKING:
    from rich.console import Console


def up(settings: UpSettings) -> int:
    """Run a cluster until Ctrl-C or SIGTERM; the exit status."""
    begin_s = time.monotonic()
    try:
        check_platform()
        check_port(settings.host, settings.port)
        check_port(settings.host, settings.sdk_port, "--grpc-port")
        if settings.redis is not None:
            check_is_ours(settings.redis)
        binary = redis_binary() if settings.redis is None else None
        dirs = make_directories()
        try:
            model = resolve_model(settings.model)
            check_memory(settings, model)
            supervisor = Supervisor(plan_cluster(settings, model, binary, dirs))
            note_cluster(dirs.logs, redis_url_of(settings, dirs))
            asyncio.run(_Run(settings, model, dirs.logs, supervisor, begin_s).run())
        finally:
            forget_cluster(dirs.logs)
            shutil.rmtree(dirs.runtime, ignore_errors=True)  # Redis may be removing its socket at the same time
    except (UpError, ModelUnavailableError, RedisMissingError) as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        print(f"pdserve: {error}: make room in {cache_dir()}, or set PDSERVE_CACHE to another disk", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the signal handlers are in place
        return 130
    return 0


class _Run:
    """One run of a cluster, from the start of its processes to their end."""

    def __init__(self, settings: UpSettings, model: Path, logs: Path, supervisor: Supervisor, begin_s: float) -> None:
        self._settings = settings
        self._name = served_model_name(settings)
        self._url = f"http://{join_address(reachable_host(settings.host), settings.port)}"
        self._logs = logs
        self._supervisor = supervisor
        self._begin_s = begin_s

    async def run(self) -> None:
        """Returns when the user has ended it and nothing runs any more. Raises: UpError, likewise."""
        with _signals() as stopped:
            work = asyncio.create_task(self._work())
            waiting = asyncio.create_task(stopped.wait())
            await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            work.cancel()
            try:
                with contextlib.suppress(asyncio.CancelledError):
                    await work
            except UpError:
                await self._supervisor.stop()
                raise
            print("\nStopping (Ctrl-C again: at once) ...", flush=True)
            print(f"Stopped {await self._stop(stopped)} processes.", flush=True)

    async def _work(self) -> None:
        """Start, chat, and (unless ``once``) stay for ever."""
        starting = asyncio.create_task(self._supervisor.start(self._settings.start_timeout_s))
        try:
            await asyncio.to_thread(__import__, "pdserve.up.first_chat")
            from rich.console import Console

            from pdserve.up.terminal import StartDisplay, print_change

            console = Console()
            with StartDisplay(console, self._supervisor.states) as display:
                self._supervisor.on_change = display.changed
                await starting
        finally:
            starting.cancel()
        self._supervisor.on_change = lambda name, state, text: print_change(console, name, state, text)
        await self._welcome(console)
        if not self._settings.once:
            await asyncio.Event().wait()

    async def _welcome(self, console: Console) -> None:
        if self._settings.chat:
            from pdserve.up.first_chat import first_chat

            await first_chat(self._url, self._name, self._settings.prompt, console)
            print(f"\nFirst answer complete {time.monotonic() - self._begin_s:.1f} s after the start.")
        body = f'{{"model": "{self._name}", "messages": [{{"role": "user", "content": "Hello!"}}], "stream": true}}'
        print(f"\nServing {self._name} at {self._url}/v1 (logs: {self._logs})\n")
        print(f"  curl -N {self._url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'\n")
        sdk = join_address(reachable_host(self._settings.host), self._settings.sdk_port)
        print(f'  pdserve.Client("{sdk}")  # in Python\n')
        print("Ctrl-C stops everything.", flush=True)

    async def _stop(self, stopped: asyncio.Event) -> int:
        """End every child; at once when ``stopped`` is set again meanwhile."""
        stopped.clear()
        stopping = asyncio.create_task(self._supervisor.stop())
        impatient = asyncio.create_task(stopped.wait())
        await asyncio.wait({stopping, impatient}, return_when=asyncio.FIRST_COMPLETED)
        impatient.cancel()
        if not stopping.done():
            self._supervisor.kill()
        return await stopping


@contextlib.contextmanager
def _signals() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C, SIGTERM and a closed terminal set."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stopped.set)
    try:
        yield stopped
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
