"""Which steps run from graphs, against what steps take an H200 and what launching them took its host."""

from __future__ import annotations

import pytest

from bench.random_models import SHAPES
from engine.launch_cost import LaunchCost
from engine.model_config import parse_model_config


@pytest.mark.parametrize(
    ("model", "tokens", "pairs", "device_ms", "launch_ms"),
    [
        ("qwen3-0.6b", 8192, 4 * 2048 * 2048 // 2, 18, 20),
        ("qwen3-0.6b", 8192, 8192 * 8192 // 2, 24, 20),
        ("qwen3-0.6b", 8192, 8192 * (24576 + 4096), 80, 20),
        ("llama-3.1-8b", 512, 512 * 512 // 2, 11, 23),
        ("llama-3.1-8b", 8192, 4 * 2048 * 2048 // 2, 182, 23),
    ],
)
def test_steps_that_launching_may_hold_up_run_from_graphs(
    model: str, tokens: int, pairs: int, device_ms: float, launch_ms: float
) -> None:
    cost = LaunchCost(parse_model_config(SHAPES[model]))
    assert cost.may_exceed(tokens, pairs) == (device_ms < 2 * launch_ms)


def test_there_are_graphs_for_what_may_run_from_them() -> None:
    small, large = (LaunchCost(parse_model_config(SHAPES[name])) for name in ("qwen3-0.6b", "llama-3.1-8b"))
    assert small.max_tokens >= 8192
    assert 2048 <= large.max_tokens < 2560
