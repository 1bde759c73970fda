"""A request as the router places it: its tokens, named in the way in which workers name their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.block_hash import hash_tokens, root_hash
from pdserve.v1 import inference_pb2 as pb
from router.chain_memo import ChainMemo
from router.prefix_index import PrefixIndex

FIRST_UNITS = 512
MAX_STRIDE = 64
"""Units in one block, at most, for which the rest of a prompt is looked at."""

ModelKind = tuple[str, int]
"""Model fingerprint and hash_block_tokens: blocks of one kind of worker have names in common."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedPrompt:
    """What is to be computed before the next token can be drawn: prompt and output so far."""

    token_ids: list[int]
    max_new_tokens: int = 0
    cache_salt: str = ""
    group: str = ""
    session: str = ""
    model_fingerprint: str = ""
    """Of the only model whose workers may go on; empty: any."""
    _hashes: dict[ModelKind, list[bytes]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, request: pb.GenerateRequest, output_so_far: Iterable[int]) -> RoutedPrompt:
        output = list(output_so_far)
        return cls(
            token_ids=[*request.prompt_token_ids, *output],
            max_new_tokens=max(1, request.sampling.max_tokens - len(output)),
            cache_salt=request.cache_salt,
            group=request.group,
            session=request.session,
            model_fingerprint=request.model_fingerprint,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def may_run_on(self, fingerprint: str) -> bool:
        """Whether a model may go on with it: no answer is of two models."""
        return self.model_fingerprint in ("", fingerprint)

    def hashes(self, kind: ModelKind, max_units: int | None = None, memo: ChainMemo | None = None) -> list[bytes]:
        """Of each full unit that a cache can help with: the last token is computed in any case. At least the first
        ``max_units``, if there are so many."""
        fingerprint, unit = kind
        hashes = self._hashes.setdefault(kind, [])
        end = len(self.token_ids) - 1
        if max_units is not None:
            end = min(end, max_units * unit)
        if len(hashes) * unit + unit <= end:
            parent = hashes[-1] if hashes else root_hash(fingerprint, self.cache_salt)
            hash_chain = memo.hash if memo is not None else hash_tokens
            hashes += hash_chain(self.token_ids, unit, parent, len(hashes) * unit, end)
        return hashes

    def find_cached(self, kind: ModelKind, index: PrefixIndex, memo: ChainMemo | None = None) -> dict[str, int]:
        """Worker -> units of this prompt that it has. Hashing is the longest part of a decision, so of a long prompt
        twice as much is hashed only when a worker has all that was hashed before."""
        max_units = FIRST_UNITS
        while True:
            beginning = self.hashes(kind, max_units, memo)
            found = index.match(beginning)
            if len(beginning) < max_units or max(found.values(), default=0) <= len(beginning) - MAX_STRIDE:
                return found
            max_units = 2 * len(beginning)
