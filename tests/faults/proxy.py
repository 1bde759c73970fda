"""A TCP proxy between all members of a fleet, its own process: where the network's faults come from.

Members listen on 127.0.0.1 and are told to advertise another loopback address. Whatever TCP port a mirrored member
listens on, this process listens on too, at that other address, and carries the bytes. Who connects is found from the
connection's inode in /proc, so that one link can be treated alone. A link is ``client>server``, as in
``router>decode-0``; the KV of a hand-off goes over the link ``prefill-0>decode-0/data`` (a port that is not the
server's ``port``).

Commands are JSON lines on stdin, each answered by one line on stdout:

    {"members": {"decode-0": {"pid": 1, "port": 2, "mirrored": true}}}   who is who from now on
    {"links": {"router>decode-0": {"hold": true}}}                        treatments; links left out go unharmed
    {"redirect": {"6379": 6380}}                                          new connections to a port go to another
    {}                                                                    what was seen: connections and bytes of links

Treatments: ``cut`` connections are reset and new ones refused; ``hold`` nothing passes; ``delay_s``; ``bytes_per_s``;
``flip`` so many bits are inverted, each in another piece of at least ``flip_from_bytes``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PIECE_BYTES = 1 << 16
MAX_PIECES_IN_FLIGHT = 64
LOOK_FOR_PORTS_S = 0.05
LISTENING, ESTABLISHED = "0A", "01"


@dataclass
class Link:
    """How the bytes of one link are treated now."""

    name: str
    cut: bool = False
    hold: bool = False
    delay_s: float = 0.0
    bytes_per_s: float = 0.0
    flips_left: int = 0
    flip_from_bytes: int = 0
    flipped: int = 0
    connections: int = 0
    bytes: int = 0
    open: set[asyncio.StreamWriter] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def treat(self, cut: bool = False, hold: bool = False, delay_s: float = 0.0, bytes_per_s: float = 0.0,
              flip: int = 0, flip_from_bytes: int = 0) -> None:  # fmt: skip
        self.cut, self.hold, self.delay_s, self.bytes_per_s = cut, hold, delay_s, bytes_per_s
        self.flips_left, self.flip_from_bytes = flip, flip_from_bytes
        self.changed.set()
        self.changed = asyncio.Event()
        if cut:
            for writer in list(self.open):
                reset(writer)

    def maybe_flip(self, piece: bytes) -> bytes:
        if not self.flips_left or len(piece) < self.flip_from_bytes:
            return piece
        self.flips_left -= 1
        self.flipped += 1
        damaged = bytearray(piece)
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
        return bytes(damaged)

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction of one connection, until its end."""
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_PIECES_IN_FLIGHT)

        async def read() -> None:
            while piece := await reader.read(PIECE_BYTES):
                await pieces.put((loop.time() + self.delay_s, piece))
            await pieces.put((loop.time(), b""))

        reading = asyncio.create_task(read())
        try:
            while True:
                due_s, piece = await pieces.get()
                if not piece:
                    break
                if (wait_s := due_s - loop.time()) > 0:
                    await asyncio.sleep(wait_s)
                while self.hold:
                    await self.changed.wait()
                if self.bytes_per_s:
                    with contextlib.suppress(TimeoutError):  # a new treatment ends the wait
                        await asyncio.wait_for(self.changed.wait(), len(piece) / self.bytes_per_s)
                self.bytes += len(piece)
                writer.write(self.maybe_flip(piece))
                await writer.drain()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a dead host's kernel does not: by RST."""
    with contextlib.suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass(frozen=True)
class Member:
    name: str
    pid: int
    port: int
    mirrored: bool

    def pids(self) -> list[int]:
        """Its process and that process's children (a worker's engine)."""
        found = [self.pid]
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                found += [int(pid) for pid in (task / "children").read_text().split()]
        return found

    def inodes(self) -> set[str]:
        """Of all its sockets."""
        found = set()
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for descriptor in os.scandir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        target = os.readlink(descriptor.path)
                        if target.startswith("socket:["):
                            found.add(target[8:-1])
        return found


def tcp_sockets(state: str) -> list[tuple[str, int, str]]:
    """(IPv4 address, local port, inode) of the host's TCP sockets in ``state``; gRPC's are IPv6 ones."""
    rows = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state:
                address, port = fields[1].split(":")
                rows.append((socket.inet_ntoa(struct.pack("<I", int(address[-8:], 16))), int(port, 16), fields[9]))
    return rows


class Proxy:
    def __init__(self, host: str) -> None:
        self._host = host
        self._members: dict[str, Member] = {}
        self._links: dict[str, Link] = {}
        self._treatments: dict[str, dict[str, Any]] = {}
        self._redirect: dict[int, int] = {}
        self._servers: dict[int, tuple[str, asyncio.Server]] = {}
        """By port: the member that it mirrors."""
        self._seen: list[tuple[str, int, str]] = []

    def link(self, name: str) -> Link:
        return self._links.setdefault(name, Link(name))

    def command(self, command: dict[str, Any]) -> dict[str, Any]:
        if "members" in command:
            self._members = {name: Member(name, **fields) for name, fields in command["members"].items()}
            self._seen = []
        if "links" in command:
            for name in self._links.keys() | command["links"].keys():
                treatment = command["links"].get(name, {})
                if treatment != self._treatments.get(name, {}):  # one that goes on is not begun anew
                    self.link(name).treat(**treatment)
            self._treatments = command["links"]
        if "redirect" in command:
            self._redirect = {int(port): target for port, target in command["redirect"].items()}
        return {
            link.name: {"connections": link.connections, "bytes": link.bytes, "flipped": link.flipped}
            for link in self._links.values()
        }

    async def mirror(self) -> None:
        """Listen where the mirrored members listen, for ever."""
        while True:
            listening = [row for row in tcp_sockets(LISTENING) if row[0] == "127.0.0.1"]
            if listening != self._seen:
                self._seen = listening
                await self._mirror(listening)
            await asyncio.sleep(LOOK_FOR_PORTS_S)

    async def _mirror(self, listening: list[tuple[str, int, str]]) -> None:
        owners: dict[int, str] = {}
        for member in self._members.values():
            if member.mirrored:
                inodes = member.inodes()
                owners |= {port: member.name for _, port, inode in listening if inode in inodes}
        for port, owner in owners.items():
            if port not in self._servers or self._servers[port][0] != owner:
                server = await asyncio.start_server(
                    lambda r, w, owner=owner, port=port: self._accept(owner, port, r, w),
                    self._host,
                    port,
                    limit=4 * PIECE_BYTES,
                )
                self._servers[port] = (owner, server)

    def _client(self, port: int) -> str:
        """Whose connection has this local port at the other end."""
        inodes = {inode for _, local_port, inode in tcp_sockets(ESTABLISHED) if local_port == port}
        for member in self._members.values():
            if inodes & member.inodes():
                return member.name
        return "client"

    async def _accept(self, owner: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = self._client(writer.get_extra_info("peername")[1])
        suffix = "" if port == self._members[owner].port else "/data"
        link = self.link(f"{client}>{owner}{suffix}")
        link.connections += 1
        if link.cut:
            reset(writer)
            return
        try:
            there_reader, there_writer = await asyncio.open_connection(
                "127.0.0.1", self._redirect.get(port, port), limit=4 * PIECE_BYTES
            )
        except OSError:
            reset(writer)
            return
        both = {writer, there_writer}
        link.open |= both
        tasks = [
            asyncio.create_task(link.carry(reader, there_writer)),
            asyncio.create_task(link.carry(there_reader, writer)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            link.open -= both
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for one in both:
                one.transport.close() if not link.cut else one.transport.abort()


async def main(host: str) -> None:
    """Until stdin ends."""
    proxy = Proxy(host)
    mirroring = asyncio.create_task(proxy.mirror())
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        if mirroring.done():
            mirroring.result()
        print(json.dumps(proxy.command(json.loads(line))), flush=True)
    os._exit(0)  # connections need no farewell


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
