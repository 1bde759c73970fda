"""A request as the router places it: its tokens, named in the way in which workers name their blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.block_hash import hash_tokens, root_hash
from pdserve.v1 import inference_pb2 as pb

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
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def hashes(self, kind: ModelKind) -> list[bytes]:
        """Of each full unit that a cache can help with: the last token is computed in any case."""
        if kind not in self._hashes:
            fingerprint, unit = kind
            root = root_hash(fingerprint, self.cache_salt)
            self._hashes[kind] = hash_tokens(self.token_ids, unit, root, 0, len(self.token_ids) - 1)
        return self._hashes[kind]
