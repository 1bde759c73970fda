"""Who has which block, as far as this router was told: block hash -> the workers that have it cached.

Owns the map, each worker's place in its event stream, and the guesses about what was just routed. Fed by
``ownership_feed`` (one task), asked by ``placement`` for every request; no I/O. Wrong entries cost cache hits, never
correctness: workers look up their own caches.

    workers     each has a bit ("slot"), and a set of its blocks, so that forgetting one costs O(its blocks)
    owners      block hash -> sum of the bits of its owners
    guesses     the same for requests routed in the last GUESS_TTL_S: the next one with this prefix goes the same way
                instead of wherever it is quiet. Two generations, so that forgetting them costs nothing
    doomed      blocks of forgotten workers: their bits mean nothing any more (``sweep`` takes them away bit by bit) and
                are given to another worker only after that

A worker's blocks are named by the hash of their last unit (engine.block_hash), so workers with other block sizes have
entries at other positions of a prompt's chain of hashes; ``match`` walks it once for each block size of the fleet.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from registry.kv_events import Batch, Cleared, Removed, Stored, split

GUESS_TTL_S = 2.0
"""A guess lives for this long at least, and twice as long at most."""
MAX_GUESSES = 262_144
"""Blocks in one generation."""
SWEEP_BLOCKS = 2000
MAX_NAMED = 128
"""Workers with a prefix of one length that ``match`` names: of more, at least half as many, by lot. Nobody looks at
hundreds that are alike, and naming them would be the longest part of a decision."""


class Outcome(Enum):
    """What became of a batch."""

    APPLIED = auto()
    KNOWN = auto()
    """All of it was applied before."""
    STALE = auto()
    """It is an older incarnation's."""
    GAP = auto()
    """Something before it is missing: take a snapshot. What is known stays in use."""


class Owner:
    """A worker in the index."""

    __slots__ = ("bit", "blocks", "incarnation", "slot", "stride", "worker_id")

    def __init__(self, worker_id: str, slot: int, stride: int) -> None:
        self.worker_id = worker_id
        self.stride = stride
        """Units of hash_block_tokens in one of its blocks."""
        self.incarnation = 0
        self.blocks: set[bytes] = set()
        self.take_slot(slot)

    def take_slot(self, slot: int) -> None:
        self.slot = slot
        self.bit = 1 << slot


class PrefixIndex:
    """Block ownership of the whole fleet."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, seed: int | None = None) -> None:
        self._clock = clock
        self._random = random.Random(seed)
        self._owners: dict[bytes, int] = {}
        self._workers: dict[str, Owner] = {}
        self._positions: dict[str, tuple[int, int]] = {}
        """Worker -> (incarnation, number of its last event that is in)."""
        self._slots: list[Owner | None] = []
        self._free_slots: deque[tuple[float, int]] = deque()
        """(not before, slot): until then there may be guesses about the last one who had it."""
        self._members: dict[int, int] = {}
        """Stride -> the bits of the workers with it."""
        self._doomed: deque[tuple[int, set[bytes]]] = deque()
        self._new_guesses: dict[bytes, int] = {}
        self._old_guesses: dict[bytes, int] = {}
        self._guesses_since_s = 0.0

    # --- the fleet ---

    def meet(self, worker_id: str, stride: int) -> bool:
        """A worker that may own blocks of ``stride`` units; what it owns comes by ``begin`` or ``apply``. Whether it
        was not known as such before."""
        owner = self._workers.get(worker_id)
        if owner is not None and owner.stride == stride:
            return False
        self.forget(worker_id)
        owner = self._workers[worker_id] = Owner(worker_id, self._new_slot(), stride)
        self._admit(owner)
        return True

    def forget(self, worker_id: str) -> None:
        """The worker is gone, and all it had."""
        owner = self._workers.pop(worker_id, None)
        self._positions.pop(worker_id, None)
        if owner is not None:
            self._doom(owner)

    def worker_ids(self) -> list[str]:
        return list(self._workers)

    def incarnation(self, worker_id: str) -> int:
        """Whose blocks are known; 0: none."""
        owner = self._workers.get(worker_id)
        return owner.incarnation if owner is not None else 0

    def position(self, worker_id: str) -> tuple[int, int]:
        """(incarnation, number of the last event that is in); (0, 0): nothing is."""
        return self._positions.get(worker_id, (0, 0))

    # --- what the workers say ---

    def begin(self, worker_id: str, incarnation: int, seq: int) -> None:
        """Of the worker nothing is known but what follows by ``add``: its blocks after event ``seq``."""
        owner = self._workers[worker_id]
        self._clear(owner)
        if owner.incarnation not in (0, incarnation) and (self._new_guesses or self._old_guesses):
            self._renew_slot(owner)  # those guesses were about the older one
        owner.incarnation = incarnation
        self._positions[worker_id] = (incarnation, seq)

    def add(self, worker_id: str, hashes: Iterable[bytes]) -> None:
        """A part of a snapshot."""
        self._store(self._workers[worker_id], hashes)

    def apply(self, worker_id: str, batch: Batch) -> Outcome:
        """Take up what is new in a batch, in whatever order batches come."""
        owner = self._workers[worker_id]
        incarnation, seq = self.position(worker_id)
        if batch.incarnation < incarnation:
            return Outcome.STALE
        if batch.incarnation > incarnation:
            self.begin(worker_id, batch.incarnation, 0)  # whatever is missing: what the older one had is gone
            seq = 0
        if batch.last_seq <= seq:
            return Outcome.KNOWN
        if not batch.begins_anew and batch.first_seq > seq + 1:
            return Outcome.GAP
        # A batch that begins with Cleared is understood by itself, even if its beginning is known.
        known = 0 if batch.begins_anew else seq + 1 - batch.first_seq
        for event in batch.events[known:]:
            match event:
                case Stored(hashes=hashes):
                    self._store(owner, split(hashes))
                case Removed(hashes=hashes):
                    self._remove(owner, split(hashes))
                case Cleared():
                    self._clear(owner)
        self._positions[worker_id] = (batch.incarnation, batch.last_seq)
        return Outcome.APPLIED

    # --- what the router asks ---

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """For each worker that has (or was just sent) the beginning of this chain: how many units of it. Of very many
        with the same, some (MAX_NAMED)."""
        self._turn_guesses()
        found: dict[str, int] = {}
        owners, new, old = self._owners.get, self._new_guesses.get, self._old_guesses.get
        guessing = bool(self._new_guesses or self._old_guesses)
        for stride, members in self._members.items():
            alive, end = members, 0
            for end in range(stride, len(hashes) + 1, stride):
                name = hashes[end - 1]
                here = owners(name, 0)
                if guessing:
                    here |= new(name, 0) | old(name, 0)
                here &= alive
                if here != alive:
                    if end > stride:
                        self._note(found, alive & ~here, end - stride)
                    alive = here
                    if not alive:
                        break
            if alive and end:
                self._note(found, alive, end)
        return found

    def owns(self, worker_id: str, name: bytes) -> bool:
        """Whether the worker has said that it has the block: no guess."""
        owner = self._workers.get(worker_id)
        return owner is not None and name in owner.blocks

    def guess(self, hashes: Sequence[bytes], known_units: int, worker_id: str, stride: int) -> None:
        """The worker is sent a prompt with this chain, of which it has ``known_units``; soon it will have it all. It
        may be one that nobody has introduced yet."""
        if worker_id not in self._workers:
            self.meet(worker_id, stride)
        owner = self._workers[worker_id]
        self._turn_guesses()
        bit, stride, guesses = owner.bit, owner.stride, self._new_guesses
        if len(guesses) >= MAX_GUESSES:
            return
        for name in hashes[known_units + stride - 1 :: stride]:
            guesses[name] = guesses.get(name, 0) | bit

    # --- housekeeping ---

    def sweep(self, max_blocks: int = SWEEP_BLOCKS) -> bool:
        """Take away some of what forgotten workers had. Whether there is more."""
        while self._doomed and max_blocks > 0:
            slot, blocks = self._doomed[0]
            keep = ~(1 << slot)
            for _ in range(min(len(blocks), max_blocks)):
                self._take_bit(blocks.pop(), keep)
                max_blocks -= 1
            if not blocks:
                self._doomed.popleft()
                self._free_slots.append((self._clock() + 2 * GUESS_TTL_S, slot))
        return bool(self._doomed)

    @property
    def num_blocks(self) -> int:
        """Different blocks that somebody owns."""
        return len(self._owners)

    @property
    def num_entries(self) -> int:
        """Blocks, counted for each of their owners."""
        return sum(len(owner.blocks) for owner in self._workers.values())

    def blocks_of(self, worker_id: str) -> frozenset[bytes]:
        """All that the worker is known to own."""
        owner = self._workers.get(worker_id)
        return frozenset(owner.blocks) if owner is not None else frozenset()

    def check_invariants(self) -> None:
        """Raises AssertionError when map and sets disagree. O(blocks): for tests."""
        expected: dict[bytes, int] = {}
        parts = [(owner.bit, owner.blocks) for owner in self._workers.values()]
        parts += [(1 << slot, blocks) for slot, blocks in self._doomed]
        for bit, blocks in parts:
            for name in blocks:
                assert not expected.get(name, 0) & bit, "two workers have one slot"
                expected[name] = expected.get(name, 0) | bit
        assert expected == self._owners, "owners and blocks disagree"
        members = sum(self._members.values())
        assert members == sum(owner.bit for owner in self._workers.values()), "a bit without its worker"

    def _store(self, owner: Owner, hashes: Iterable[bytes]) -> None:
        owners, blocks, bit = self._owners, owner.blocks, owner.bit
        # Neighbours in a chain mostly have the same owners: let them share the one number, which for many workers is
        # larger than all the rest of the entry.
        before, after = 0, bit
        for name in hashes:
            if name in blocks:
                continue
            blocks.add(name)
            others = owners.get(name, 0)
            if others != before:
                before, after = others, others | bit
            owners[name] = after

    def _remove(self, owner: Owner, hashes: Iterable[bytes]) -> None:
        keep = ~owner.bit
        for name in hashes:
            if name in owner.blocks:
                owner.blocks.remove(name)
                self._take_bit(name, keep)

    def _take_bit(self, name: bytes, keep: int) -> None:
        left = self._owners[name] & keep
        if not left:
            del self._owners[name]
            return
        last = self._slots[left.bit_length() - 1]
        self._owners[name] = last.bit if last is not None and last.bit == left else left

    def _clear(self, owner: Owner) -> None:
        """Guesses about a worker that had nothing stay: it was sent those prompts, whatever its first words are."""
        if owner.blocks:
            self._renew_slot(owner)

    def _renew_slot(self, owner: Owner) -> None:
        """O(1): the blocks are left to ``sweep``, and guesses about the old slot mean nothing any more."""
        self._doom(owner)
        owner.blocks = set()
        owner.take_slot(self._new_slot())
        self._admit(owner)

    def _admit(self, owner: Owner) -> None:
        self._slots[owner.slot] = owner
        self._members[owner.stride] = self._members.get(owner.stride, 0) | owner.bit

    def _doom(self, owner: Owner) -> None:
        self._slots[owner.slot] = None
        self._members[owner.stride] &= ~owner.bit
        if not self._members[owner.stride]:
            del self._members[owner.stride]
        self._doomed.append((owner.slot, owner.blocks))

    def _new_slot(self) -> int:
        if self._free_slots and self._free_slots[0][0] <= self._clock():
            return self._free_slots.popleft()[1]
        self._slots.append(None)
        return len(self._slots) - 1

    def _note(self, found: dict[str, int], bits: int, units: int) -> None:
        while bits.bit_count() > MAX_NAMED:
            bits = bits & self._random.getrandbits(bits.bit_length()) or bits
        while bits:
            low = bits & -bits
            owner = self._slots[low.bit_length() - 1]
            assert owner is not None, "only members are matched"
            found[owner.worker_id] = units
            bits ^= low

    def _turn_guesses(self) -> None:
        age_s = self._clock() - self._guesses_since_s
        if age_s >= GUESS_TTL_S:
            self._old_guesses = self._new_guesses if age_s < 2 * GUESS_TTL_S else {}
            self._new_guesses = {}
            self._guesses_since_s = self._clock()
