"""How long a step takes on a device of made-up speeds: the oracle of the ITL budget's tests."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

MAX_TOKENS = 4096
"""Of a step."""


def pairs(prefill_tokens: int, context: int) -> int:
    return prefill_tokens * (2 * context + prefill_tokens) // 2


@dataclass(frozen=True)
class Device:
    """Weights are read once, computing is as long as the tokens are many, KV is read for each decode."""

    read_weights_s: float
    s_per_token: float
    s_per_kv_token: float
    launch_s: float
    s_per_pair: float = 0.0

    def step_s(self, decodes: int, kv_tokens: int, prefill_tokens: int, context: int = 0) -> float:
        computing_s = self.s_per_token * (decodes + prefill_tokens) + self.s_per_pair * pairs(prefill_tokens, context)
        return self.launch_s * (prefill_tokens > 0) + max(self.read_weights_s, computing_s) + (
            self.s_per_kv_token * kv_tokens
        )  # fmt: skip

    def most_tokens(self, budget_s: float, decodes: int, kv_tokens: int) -> int:
        """What an oracle would take."""
        fitting = [n for n in range(MAX_TOKENS + 1) if self.step_s(decodes, kv_tokens, n) <= budget_s]
        return fitting[-1] if fitting else 0


devices = st.builds(
    Device,
    read_weights_s=st.floats(0.5e-3, 10e-3),
    s_per_token=st.floats(2e-6, 500e-6),
    s_per_kv_token=st.floats(0, 40e-9),
    launch_s=st.floats(0, 2e-3),
    s_per_pair=st.sampled_from([0.0, 1e-10, 1e-9]),
)
