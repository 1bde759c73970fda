"""Time in a hand-off: leases, tombstones, parking and epochs, on one injected monotonic clock.

A lease is what makes freeing independent of a live peer: the side that owns the memory frees it when the lease is over.
Clocks are never compared between hosts; a side only measures durations on its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from kv_transfer.transfer import TransferKey

Clock = Callable[[], float]
T = TypeVar("T")


class Lease:
    """Ends ``lease_s`` after the last renewal, and never later than the request's deadline."""

    def __init__(self, clock: Clock, lease_s: float, limit_s: float) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._limit_s = limit_s
        self.expires_s = min(clock() + lease_s, limit_s)

    @property
    def expired(self) -> bool:
        return self._clock() >= self.expires_s

    def renew(self) -> None:
        """The peer was heard. A lease that is over stays over: its owner may have slept, and the peer moved on."""
        if not self.expired:
            self.expires_s = min(self._clock() + self._lease_s, self._limit_s)


class Epochs:
    """Numbers for reservations: unique in an incarnation, and different between incarnations of one worker."""

    def __init__(self, incarnation: int) -> None:
        self._last = incarnation

    def next(self) -> int:
        self._last += 1
        return self._last


class Tombstones:
    """Which transfers are over, kept for one lease: whoever comes late is refused instead of parked."""

    def __init__(self, clock: Clock, keep_s: float, limit: int = 65536) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._limit = limit
        self._graves: OrderedDict[str, tuple[int, float, str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._graves)

    def add(self, key: TransferKey, reason: str) -> None:
        """This attempt and all earlier ones are over."""
        before = self._graves.pop(key.transfer_id, None)
        if before is not None and before[0] > key.attempt:
            key, reason = TransferKey(key.transfer_id, before[0]), before[2]
        self._graves[key.transfer_id] = (key.attempt, self._clock() + self._keep_s, reason)
        if len(self._graves) > self._limit:
            self._graves.popitem(last=False)

    def reason(self, key: TransferKey) -> str | None:
        """Why this attempt is over; None when it is not known to be."""
        grave = self._graves.get(key.transfer_id)
        if grave is None or key.attempt > grave[0]:
            return None
        return grave[2] if key.attempt == grave[0] else f"stale attempt {key.attempt}: attempt {grave[0]} is known"

    def sweep(self) -> None:
        now = self._clock()
        while self._graves and next(iter(self._graves.values()))[1] <= now:
            self._graves.popitem(last=False)


class Parking(Generic[T]):
    """What came before, or was left for, the one that wants it: for ``keep_s`` at most, ``limit`` at most."""

    def __init__(self, clock: Clock, keep_s: float, limit: int = 1024) -> None:
        self._clock = clock
        self._keep_s = keep_s
        self._limit = limit
        self._parked: OrderedDict[TransferKey, tuple[float, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._parked)

    def park(self, key: TransferKey, item: T) -> bool:
        """False: no room. An item that is parked already keeps its time."""
        if key not in self._parked and len(self._parked) >= self._limit:
            return False
        until_s = self._parked[key][0] if key in self._parked else self._clock() + self._keep_s
        self._parked[key] = (until_s, item)
        return True

    def is_parked(self, key: TransferKey) -> bool:
        return key in self._parked

    def take(self, key: TransferKey) -> T | None:
        entry = self._parked.pop(key, None)
        return None if entry is None else entry[1]

    def take_expired(self) -> list[tuple[TransferKey, T]]:
        now = self._clock()
        out: list[tuple[TransferKey, T]] = []
        while self._parked and next(iter(self._parked.values()))[0] <= now:
            key, (_, item) = self._parked.popitem(last=False)
            out.append((key, item))
        return out

    def take_where(self, matches: Callable[[T], bool]) -> list[tuple[TransferKey, T]]:
        keys = [key for key, (_, item) in self._parked.items() if matches(item)]
        return [(key, self._parked.pop(key)[1]) for key in keys]

    @property
    def next_deadline_s(self) -> float | None:
        return next(iter(self._parked.values()))[0] if self._parked else None
