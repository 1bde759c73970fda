"""A prompt that has waited gets on, also where decodes alone take the ITL budget: simulated devices, no clock.

What the budget's docstring promises: after AGEING_S a prompt has MOST_SHARE of the time, so it takes no longer than
that and 1 / MOST_SHARE of what it would take alone; and no step is longer than the budget, or than half as long again
as its decodes alone (or than these with twice MIN_TOKENS, which it may have in any case).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.itl_budget import AGEING_S, MIN_TOKENS, MOST_SHARE, ItlBudget, StepLoad
from tests.unit.simulated_device import MAX_TOKENS, Device, devices, pairs

LEARNED_WITHIN = 1.1
DOUBLING_STEPS = 8
"""Until it may take as much as it wants: it never takes more than twice what it took."""


@dataclass(frozen=True)
class Linear(Device):
    """What the budget can learn of a device; the others' bends it learns roughly, which is another test's subject."""

    def step_s(self, decodes: int, kv_tokens: int, prefill_tokens: int, context: int = 0) -> float:
        computing_s = self.s_per_token * (decodes + prefill_tokens) + self.s_per_pair * pairs(prefill_tokens, context)
        return self.read_weights_s + computing_s + self.s_per_kv_token * kv_tokens


linear_devices = devices.map(
    lambda d: Linear(d.read_weights_s, d.s_per_token, d.s_per_kv_token, d.launch_s, d.s_per_pair)
)


def trained(device: Device, decodes: int, kv_tokens: int, budget_s: float) -> ItlBudget:
    """It has seen decodes alone, and prompts take the fewest tokens beside them."""
    budget = ItlBudget(budget_s, MAX_TOKENS)
    for context in range(0, 8192, MIN_TOKENS):
        budget.step_took(StepLoad(decodes, kv_tokens), device.step_s(decodes, kv_tokens, 0))
        load = StepLoad(decodes, kv_tokens, MIN_TOKENS, pairs(MIN_TOKENS, context))
        budget.step_took(load, device.step_s(decodes, kv_tokens, MIN_TOKENS, context))
    return budget


def compute(
    budget: ItlBudget, device: Device, decodes: int, kv_tokens: int, prompt_tokens: int, *, ages: bool = True
) -> list[tuple[float, int]]:
    """One prompt beside decodes that do not end: (seconds, its tokens before) of each step."""
    steps: list[tuple[float, int]] = []
    done, now_s = 0, 0.0
    while done < prompt_tokens:
        tokens = budget.prefill_tokens(decodes, kv_tokens, done, now_s if ages else 0.0)
        tokens = min(tokens, prompt_tokens - done)
        took_s = device.step_s(decodes, kv_tokens, tokens, done)
        budget.step_took(StepLoad(decodes, kv_tokens, tokens, pairs(tokens, done)), took_s)
        steps.append((took_s, done))
        now_s += took_s
        done += tokens
    return steps


def alone_s(device: Device, decodes: int, kv_tokens: int, prompt_tokens: int) -> float:
    """What the prompt adds to steps of the largest size."""
    return sum(
        device.step_s(decodes, kv_tokens, min(MAX_TOKENS, prompt_tokens - done), done)
        - device.step_s(decodes, kv_tokens, 0)
        for done in range(0, prompt_tokens, MAX_TOKENS)
    )


@settings(max_examples=150, deadline=None)
@given(
    device=linear_devices,
    decodes=st.integers(1, 512),
    tokens_each=st.integers(1, 8192),
    prompt_tokens=st.integers(1, 16_384),
    budget_part=st.floats(0.2, 3.0),
)
def test_every_prompt_gets_on_and_no_step_is_longer_than_said(
    device: Linear, decodes: int, tokens_each: int, prompt_tokens: int, budget_part: float
) -> None:
    kv_tokens = decodes * tokens_each
    decodes_s = device.step_s(decodes, kv_tokens, 0)
    budget_s = budget_part * decodes_s
    steps = compute(trained(device, decodes, kv_tokens, budget_s), device, decodes, kv_tokens, prompt_tokens)
    for took_s, done in steps:
        least_s = device.step_s(decodes, kv_tokens, 2 * MIN_TOKENS, done)
        assert took_s <= LEARNED_WITHIN * max(budget_s, decodes_s / (1 - MOST_SHARE), least_s)
    longest_s = max(took_s for took_s, _ in steps)
    bound_s = AGEING_S + LEARNED_WITHIN * alone_s(device, decodes, kv_tokens, prompt_tokens) / MOST_SHARE
    assert sum(took_s for took_s, _ in steps) <= bound_s + DOUBLING_STEPS * longest_s


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_long_prompt_on_a_crowded_worker(is_trained: bool) -> None:
    """Decodes alone take twice the budget: 8,192 tokens would take 256 steps. Also where no step was without prompt
    tokens yet, so that what they cost is not told apart from what the decodes do."""
    device, crowd = Device(4e-3, 25e-6, 15e-9, 1e-3), (512, 1 << 20)
    budgets = [trained(device, *crowd, 0.014) if is_trained else ItlBudget(0.014, MAX_TOKENS) for _ in range(2)]
    crawls, ages = (
        compute(budget, device, *crowd, 8192, ages=a) for budget, a in zip(budgets, (False, True), strict=True)
    )
    assert len(crawls) == 8192 // MIN_TOKENS
    assert len(ages) <= 64
    assert sum(took_s for took_s, _ in ages) < sum(took_s for took_s, _ in crawls) / 4
    assert max(took_s for took_s, _ in ages) < LEARNED_WITHIN * 1.5 * device.step_s(*crowd, 0)


@given(
    waits_s=st.lists(st.floats(0, 100), min_size=2, max_size=6).map(sorted),
    device=devices,
    decodes=st.integers(1, 200),
    context=st.integers(0, 30_000),
    budget_ms=st.floats(1, 50),
)
@settings(max_examples=60, deadline=None)
def test_the_longer_it_waits_the_larger_its_share(
    waits_s: list[float], device: Device, decodes: int, context: int, budget_ms: float
) -> None:
    budget = trained(device, decodes, decodes * 1024, budget_ms / 1e3)
    before = budget.prefill_tokens(decodes, decodes * 1024, context)
    for waited_s in waits_s:
        tokens = budget.prefill_tokens(decodes, decodes * 1024, context, waited_s)
        assert before <= tokens <= MAX_TOKENS
        before = tokens
    most = budget.prefill_tokens(decodes, decodes * 1024, context, AGEING_S)
    assert budget.prefill_tokens(decodes, decodes * 1024, context, 10 * AGEING_S) == most


def test_steps_that_were_to_be_longer_teach_it_no_caution() -> None:
    """Else prompts that come later, to a worker that has time again, would get less than fits."""
    device, rng = Device(4e-3, 25e-6, 15e-9, 1e-3), random.Random(3)
    calm, crowded = (30, 60_000), (512, 1 << 20)
    budget = trained(device, *calm, 0.014)
    for _ in range(300):
        compute(budget, device, *calm, rng.randrange(1, 4096), ages=False)
    fits = budget.prefill_tokens(*calm)
    assert device.step_s(*calm, fits) <= 0.014
    for _ in range(30):
        compute(budget, device, *crowded, 8192)
    for _ in range(20):
        compute(budget, device, *calm, rng.randrange(1, 4096), ages=False)
    assert budget.prefill_tokens(*calm) >= 0.9 * fits
