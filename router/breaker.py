"""Circuit breakers: a worker whose requests all fail is left out for a while, though its session and health are fine.

    closed --FAILURES in a row--> open --its time is over--> half open: one request is sent to see
       ^                           ^                             |
       |                           '---- it fails: twice as long-|
       '-------------------------------- it succeeds ------------'

In a row means one begun after the other had failed: many that fail together have one cause, and it may be the peer.
Only failures that are the worker's own doing count (``COUNTED``). With nobody else the worker is used all the same
(``placement``): an ejection is a preference. Kept by incarnation; each router has its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import structlog

from pdserve.v1 import inference_pb2 as pb

FAILURES = 5
FIRST_EJECTION_S = 1.0
LONGEST_EJECTION_S = 60.0
MAX_WORKERS = 4096

COUNTED = frozenset({pb.ERROR_CODE_INTERNAL, pb.ERROR_CODE_HANDOFF_FAILED})
"""Not a lost worker (its session says so) and not a full one (it says so)."""

WorkerKey = tuple[str, int]
"""Worker id and incarnation: a restarted worker has failed nobody yet."""

log = structlog.get_logger()


@dataclass(slots=True)
class _Breaker:
    failures: int = 0
    """In a row."""
    last_failure_s: float = float("-inf")
    ejection_s: float = 0.0
    """How long it is or was left out; 0: it is not."""
    until_s: float = 0.0
    is_probed: bool = False
    """Half open, and the one request is on its way."""


class Breakers:
    """Of all workers that have failed lately; those that did not have none."""

    def __init__(self, clock: Callable[[], float], on_ejection: Callable[[str], None] = lambda worker_id: None) -> None:
        self._clock = clock
        self._on_ejection = on_ejection
        self._breakers: OrderedDict[WorkerKey, _Breaker] = OrderedDict()
        self._open: set[WorkerKey] = set()

    def ejected(self) -> set[WorkerKey]:
        """Those that should get nothing now. Of the half-open ones all but one: two of them in one pair would blame
        each other. O(open breakers): mostly nothing."""
        if not self._open:
            return set()
        now_s = self._clock()
        due = [key for key in self._open if not self._breakers[key].is_probed and self._breakers[key].until_s <= now_s]
        return self._open - {min(due, key=lambda key: self._breakers[key].until_s)} if due else set(self._open)

    def keep(self, keys: Collection[WorkerKey]) -> None:
        """All others are gone, or were started again."""
        for key in self._open.difference(keys):
            self._open.remove(key)
            del self._breakers[key]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def sent(self, keys: Iterable[WorkerKey]) -> None:
        """They get a request; of a half-open one it is the one that shows how it is."""
        for key in self._open.intersection(keys):
            if self._clock() >= self._breakers[key].until_s:
                self._breakers[key].is_probed = True

    def ended(
        self,
        keys: Iterable[WorkerKey],
        suspects: Collection[WorkerKey],
        code: pb.ErrorCode.ValueType,
        begun_s: float,
        has_tokens: bool,
    ) -> None:
        """A request that was sent to ``keys`` at ``begun_s`` ended. ``suspects``: whose doing its error may be.
        ``has_tokens``: the others did what they were asked."""
        for key in keys:
            if key in suspects and code in COUNTED:
                self._failed(key, code, begun_s)
            elif has_tokens and key not in suspects:
                self._succeeded(key)
            elif key in self._open:
                self._breakers[key].is_probed = False

    def _failed(self, key: WorkerKey, code: pb.ErrorCode.ValueType, begun_s: float) -> None:
        breaker = self._breakers.setdefault(key, _Breaker())
        self._breakers.move_to_end(key)
        if len(self._breakers) > MAX_WORKERS:
            oldest, _ = self._breakers.popitem(last=False)
            self._open.discard(oldest)
        breaker.is_probed = False
        if begun_s < breaker.last_failure_s:
            return
        now_s = breaker.last_failure_s = self._clock()
        breaker.failures += 1
        if breaker.failures < FAILURES:
            return
        breaker.ejection_s = min(LONGEST_EJECTION_S, max(FIRST_EJECTION_S, 2 * breaker.ejection_s))
        breaker.until_s = now_s + breaker.ejection_s
        self._open.add(key)
        self._on_ejection(key[0])
        log.warning(
            "worker ejected: all its requests fail",
            worker=key[0],
            incarnation=key[1],
            failures=breaker.failures,
            code=pb.ErrorCode.Name(code),
            seconds=breaker.ejection_s,
        )

    def _succeeded(self, key: WorkerKey) -> None:
        if self._breakers.pop(key, None) is not None and key in self._open:
            self._open.remove(key)
            log.info("worker works again", worker=key[0], incarnation=key[1])
