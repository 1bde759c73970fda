"""What the core asks of a model runner, whichever device it serves (``engine.runners`` says which those are)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from engine.batch import SampledBatch, ScheduledBatch


class KVMemory(Protocol):
    """What the core asks of ``KVCache``."""

    @property
    def num_layers(self) -> int: ...
    def unpack(
        self,
        block_table: list[int],
        token_start: int,
        token_end: int,
        layer_start: int,
        layer_end: int,
        payload: Any,
        dtype: Any,
    ) -> Any:
        """None, or the copy that a device does when the caller lets it start."""
        ...


class Runner(Protocol):
    """What the core asks of ``ModelRunner``. Values measured at start; they do not change."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> Sequence[int]: ...
    @property
    def model_fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def kv_cache(self) -> KVMemory: ...

    def run(self, batch: ScheduledBatch, on_layers: Callable[[int, int], None] | None = None) -> SampledBatch: ...


class PendingStep(Protocol):
    """A launched step."""

    def is_done(self) -> bool:
        """Whether ``result`` would not wait."""
        ...

    def result(self) -> SampledBatch:
        """Waits for the device. Called once, in the order of launches."""
        ...


@runtime_checkable
class AsyncRunner(Runner, Protocol):
    """A runner whose steps overlap with the host. At most two are launched and not read."""

    @property
    def padded_rows(self) -> Sequence[int]:
        """A step with prompt tokens computes as many rows as the next of these, however few tokens it has; one that has
        more than the last, or thousands with long contexts, computes so many. Empty: all do."""
        ...

    def launch(self, batch: ScheduledBatch, on_layers: Callable[[int, int], None] | None = None) -> PendingStep:
        """As ``run``, without waiting. An input token that is not known yet is the one its request drew last."""
        ...
