"""One life of an engine process: started, watched, spoken to, ended. The service's side of ``engine.messages``.

Owns the child process, its two ZeroMQ sockets and the private directory in which they meet. Does not restart anything
(engine_supervisor does). An engine is dead when its process ended, when it said so (EngineFailed), or when it was
silent for ``silence_s``: it sends something after each step and twice a second when idle.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from engine.messages import EngineFailed, EngineReady, FromEngine, PeerFrame, StepOutputs, ToEngine
from worker.launch import EngineLaunch, encode_launch

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 3.0
MAX_QUEUED_MESSAGES = 100_000


class EngineLost(Exception):
    """The engine is gone, or cannot start; the message says why."""


class EngineClient:
    """Call ``start`` once, then iterate ``messages`` until EngineLost, then ``stop``."""

    def __init__(self, module: str, launch: EngineLaunch, *, silence_s: float = 30.0) -> None:
        """``launch`` lacks its socket addresses; they are made here."""
        self._module = module
        self._silence_s = silence_s
        self.directory = Path(tempfile.mkdtemp(prefix="pdserve-engine-"))  # 0700: nobody else can connect
        self._launch = msgspec.structs.replace(
            launch,
            to_engine=f"ipc://{self.directory}/to",
            from_engine=f"ipc://{self.directory}/from",
            parent_pid=os.getpid(),
        )
        self._context = zmq.Context(io_threads=1)
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = zmq.asyncio.Context.shadow(self._context.underlying).socket(zmq.PULL)
        for socket, address in (
            (self._to_engine, self._launch.to_engine),
            (self._from_engine, self._launch.from_engine),
        ):
            socket.set_hwm(MAX_QUEUED_MESSAGES)
            socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._process: subprocess.Popen[bytes] | None = None
        self._exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit status."""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> EngineReady:
        """Spawn the process and wait until it can take requests.

        Raises:
            EngineLost: it cannot.
        """
        self._spawn()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive(timeout_s)
                    if isinstance(message, EngineReady):
                        # Both sockets are connected: nobody needs their names, which a kill would leave behind.
                        self._forget_directory()
                        return message
        except TimeoutError:
            raise EngineLost(f"the engine was not ready within {timeout_s:.0f} s") from None

    async def messages(self) -> AsyncIterator[StepOutputs | PeerFrame]:
        """Everything the engine says.

        Raises:
            EngineLost: it is gone.
        """
        while True:
            message = await self._receive(self._silence_s)
            if not isinstance(message, EngineReady):
                yield message

    def send(self, message: ToEngine) -> bool:
        """Never waits. False when the engine's queue is full: it has stopped reading."""
        try:
            self._to_engine.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    async def stop(self) -> None:
        """End the process (terminate, then kill) and give everything back."""
        if self._process is not None:
            for end in (self._process.terminate, self._process.kill):
                if self._exited.done():
                    break
                end()
                await asyncio.wait([self._exited], timeout=STOP_TIMEOUT_S)
        self._to_engine.close(linger=0)
        self._from_engine.close(linger=0)
        self._context.term()
        self._forget_directory()

    def _forget_directory(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)

    def _spawn(self) -> None:
        """By vfork: a fork would run gRPC's fork handlers while its threads are at work, and that crashes the child."""
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", self._module, encode_launch(self._launch)],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C in the terminal is for the service, which ends the engine in order
        )
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(process.pid)

        def on_exit() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._exited.set_result(process.wait())

        loop.add_reader(pidfd, on_exit)

    async def _receive(self, timeout_s: float) -> EngineReady | StepOutputs | PeerFrame:
        receiving: asyncio.Future[Any] = asyncio.ensure_future(self._from_engine.recv())
        waiting: list[asyncio.Future[Any]] = [receiving, self._exited]
        try:
            await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done() and self._exited.done():
                await asyncio.wait([receiving], timeout=0.1)  # its last words
            if not receiving.done():
                raise EngineLost(
                    f"the engine process ended with status {self._exited.result()}"
                    if self._exited.done()
                    else f"the engine was silent for {timeout_s:.0f} s"
                )
            message = self._decoder.decode(receiving.result())
        except msgspec.DecodeError as error:
            raise EngineLost(f"the engine sent what cannot be read: {error}") from error
        finally:
            receiving.cancel()
        if isinstance(message, EngineFailed):
            raise EngineLost(message.message)
        return message
