"""The faults: what is done to which place, how it is healed, and with which ends of the request that may be answered.

All of them come from outside: signals, the proxy, Redis' own commands, a file that fills the disk, other requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.cluster import Member, wait_until
from tests.faults.asking import LOSS, Asking
from tests.faults.fleet import Fleet, cont, eventually, redis_answers

PROCESSES = ("gateway", "router", "prefill", "decode", "prefill_engine", "decode_engine", "redis")
LINKS: dict[str, tuple[tuple[str, str, bool], ...]] = {
    "gateway-router": (("gateway", "router", False),),
    "router-prefill": (("router", "prefill", False),),
    "router-decode": (("router", "decode", False),),
    "prefill-decode": (("prefill", "decode", False),),
    "kv-data": (("prefill", "decode", True),),
    "router-redis": (("router", "redis", False),),
    "worker-redis": (("prefill", "redis", False), ("decode", "redis", False)),
}
MTLS_LINKS = ("gateway-router", "router-prefill", "router-decode", "prefill-decode")
MILD_PLACES = frozenset({"redis", "router-redis", "worker-redis", "disk"})
"""What no request needs: whatever happens there, the answer comes."""


@dataclass
class Context:
    """What a fault may use and must put back."""

    fleet: Fleet
    asking: Asking | None
    """Whose client a fault may be."""
    prompt: list[int]
    place: str
    victims: list[Member] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    others: list[Asking] = field(default_factory=list)
    flips_before: int = 0

    @property
    def treatment(self) -> str:
        """The name under which the proxy treats links for it."""
        return f"fault at {self.place}"


Act = Callable[[Context], None]


@dataclass(frozen=True)
class Fault:
    kind: str
    places: tuple[str, ...]
    inject: Act
    heal: Act
    hold_s: float = 0.3
    """Between the two."""
    errors: frozenset[str] = LOSS
    """Typed ends that are right, beside the whole answer."""
    must_fail: bool = False
    """The answer would be wrong: the client left, or its time was over."""
    happened: Callable[[Context], bool] = lambda context: True
    """Asked when it is healed."""


def ends(fault: Fault, place: str, shape: str) -> frozenset[str]:
    """Kinds of outcomes and codes that are right: answer, gone, lost, or an error's code."""
    if fault.must_fail:
        return fault.errors
    if place in MILD_PLACES:
        return frozenset({"answer"})
    allowed = fault.errors | {"answer"}
    if place == "gateway" and fault.kind in ("kill", "restart"):
        # Nobody is left to say anything: the connection itself ends. The SDK looks for a gateway for a while.
        allowed |= {"lost"} if shape != "sdk" else {"ConnectionFailedError", "connection_failed"}
    return allowed


def nothing(context: Context) -> None:
    """There is nothing to do."""


# ---- processes


def _targets(context: Context) -> None:
    """Who is hit, and which of its processes."""
    role, _, engine = context.place.partition("_")
    member = context.fleet.holder(role)
    pids = context.fleet.pids(member)
    context.victims = [member]
    context.pids = pids[1:] if engine else pids


def kill(context: Context) -> None:
    _targets(context)
    member = context.victims[0]
    if context.place.endswith("_engine"):
        for pid in context.pids:
            os.kill(pid, signal.SIGKILL)
        context.victims = []  # its service starts another
    else:
        member.kill()


def start_again(context: Context) -> None:
    for member in context.victims:
        context.fleet.start_again(member)


def restart(context: Context) -> None:
    kill(context)
    start_again(context)


def stop(context: Context) -> None:
    _targets(context)
    for pid in context.pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)


def wake(context: Context) -> None:
    cont(context.pids)


# ---- the network


def _treat(**treatment: bool | float) -> Act:
    def act(context: Context) -> None:
        links = [name for client, server, data in LINKS[context.place]
                 for name in context.fleet.links(client, server, data)]  # fmt: skip
        context.fleet.treat(context.treatment, {name: dict(treatment) for name in links})

    return act


def flip(from_bytes: int, num_bits: int) -> Act:
    def act(context: Context) -> None:
        context.flips_before = _num_flips(context)
        _treat(flip=num_bits, flip_from_bytes=from_bytes)(context)

    return act


def has_flipped(context: Context) -> bool:
    """Whether anything passed that could be damaged."""
    return _num_flips(context) > context.flips_before


def _num_flips(context: Context) -> int:
    return sum(link["flipped"] for link in context.fleet.traffic().values())


def _untreat(context: Context) -> None:
    context.fleet.untreat(context.treatment)


# ---- the client


def leave(context: Context) -> None:
    assert context.asking is not None
    context.asking.leave()


# ---- Redis


def flush(context: Context) -> None:
    context.fleet.redis_call("FLUSHALL")


def fill_redis(context: Context) -> None:
    context.fleet.redis_call("CONFIG", "SET", "maxmemory-policy", "noeviction")
    context.fleet.redis_call("CONFIG", "SET", "maxmemory", "1")


def empty_redis(context: Context) -> None:
    context.fleet.redis_call("CONFIG", "SET", "maxmemory", "0")


def make_read_only(context: Context) -> None:
    """A replica of nobody."""
    context.fleet.redis_call("REPLICAOF", "127.0.0.1", "1")


def make_writable(context: Context) -> None:
    context.fleet.redis_call("REPLICAOF", "NO", "ONE")


def fail_over(context: Context) -> None:
    """The standby copies everything, the active one dies, the standby takes its place."""
    fleet = context.fleet
    old = fleet[fleet.active_redis]
    new = fleet["redis-standby" if old.name == "redis" else "redis"]
    fleet.redis_call("REPLICAOF", "127.0.0.1", str(old.port), name=new.name)
    wait_until("replica in sync", lambda: b"master_link_status:up" in _replication(fleet, new.name))
    old.kill()
    fleet.redis_call("REPLICAOF", "NO", "ONE", name=new.name)
    fleet.use_redis(new.name)
    context.victims = [old]


def _replication(fleet: Fleet, name: str) -> bytes:
    info = fleet.redis_call("INFO", "replication", name=name)
    return info if isinstance(info, bytes) else "\n".join(f"{k}:{v}" for k, v in info.items()).encode()


def restore_redis(context: Context) -> None:
    start_again(context)
    for member in context.victims:
        assert eventually(lambda member=member: redis_answers(member.port), 10)


# ---- what runs out


def fill_disk(context: Context) -> None:
    """Not a byte is left where the logs are; nothing where that is not a disk of their own (no right to mount one)."""
    if not context.fleet.has_small_disk:
        return
    block = b"\0" * 65536
    with _filler(context).open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(block if file.tell() < 1 << 30 else b"")
    with _filler(context).open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0")


def empty_disk(context: Context) -> None:
    _filler(context).unlink(missing_ok=True)


def _filler(context: Context) -> Path:
    return context.fleet.directory / "filler"


def fill_pools(context: Context) -> None:
    """More requests than all pools hold, of the same size."""
    for _ in range(4):
        context.others.append(context.fleet.ask(context.prompt, 60))


FAULTS = (
    Fault("disconnect", ("client",), leave, nothing, errors=frozenset({"gone"}), must_fail=True),
    Fault("abort", ("client",), leave, nothing, errors=frozenset({"gone"}), must_fail=True),
    Fault("deadline", ("client",), nothing, nothing, errors=frozenset({"deadline_exceeded"}), must_fail=True),
    Fault("kill", PROCESSES, kill, start_again, hold_s=3.0),
    Fault("stop", PROCESSES, stop, wake, hold_s=4.0),
    Fault("restart", ("gateway", "router", "prefill", "decode", "redis"), restart, nothing),
    Fault("cut", tuple(LINKS), _treat(cut=True), _untreat, hold_s=2.5),
    Fault("partition", tuple(LINKS), _treat(hold=True), _untreat, hold_s=4.0),
    Fault("delay", tuple(LINKS), _treat(delay_s=0.25), _untreat, hold_s=3.0),
    Fault("bit_flips", ("kv-data",), flip(4096, 3), _untreat, hold_s=2.0, happened=has_flipped),
    Fault("tls_bit_flips", MTLS_LINKS, flip(16, 1), _untreat, hold_s=2.0, happened=has_flipped),
    Fault("redis_flushed", ("redis",), flush, nothing),
    Fault("redis_full", ("redis",), fill_redis, empty_redis, hold_s=3.0),
    Fault("redis_read_only", ("redis",), make_read_only, make_writable, hold_s=3.0),
    Fault("redis_failed_over", ("redis",), fail_over, restore_redis),
    Fault("disk_full", ("disk",), fill_disk, empty_disk, hold_s=2.0),
    Fault("pools_full", ("pools",), fill_pools, nothing, errors=LOSS | {"overloaded"}),
)
BY_KIND = {fault.kind: fault for fault in FAULTS}
