"""The ITL budget against a simulated device: it makes progress, keeps its bounds, and finds what the budget allows."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.itl_budget import MIN_TOKENS, ItlBudget, StepLoad
from tests.unit.simulated_device import MAX_TOKENS, Device, devices, pairs

LARGEST_KV = 262_144


def run(
    budget: ItlBudget,
    device: Device,
    rng: random.Random,
    steps: int,
    *,
    decodes: int,
    noise: float,
    longest_prompt: int = 4096,
) -> list[float]:
    """Prompts always wait; a few decodes come and go. The true seconds of each step."""
    took, context, prompt_tokens = [], 0, 2048
    for _ in range(steps):
        now = max(1, decodes + rng.randrange(-2, 3))
        kv_tokens = min(LARGEST_KV, now * 2048 + rng.randrange(2048))
        tokens = min(budget.prefill_tokens(now, kv_tokens, context), prompt_tokens - context)
        true_s = device.step_s(now, kv_tokens, tokens, context)
        took.append(true_s)
        measured_s = true_s * rng.uniform(1 - noise, 1 + noise)
        if noise and rng.random() < 0.02:
            measured_s += rng.choice((0.05, 0.5, 3.0))  # something stalled
        budget.step_took(StepLoad(now, kv_tokens, tokens, pairs(tokens, context)), measured_s)
        context += tokens
        if context == prompt_tokens:
            context, prompt_tokens = 0, rng.randrange(1, longest_prompt)
    return took


@given(device=devices, seed=st.integers(0, 1000), decodes=st.integers(1, 100), budget_ms=st.floats(12, 100))
@settings(max_examples=60, deadline=None)
def test_it_finds_what_the_budget_allows(device: Device, seed: int, decodes: int, budget_ms: float) -> None:
    budget_s = budget_ms / 1e3
    budget, rng = ItlBudget(budget_s, MAX_TOKENS), random.Random(seed)
    for _ in range(50):
        budget.step_took(StepLoad(decodes, decodes * 2048), device.step_s(decodes, decodes * 2048, 0))
    run(budget, device, rng, 300, decodes=decodes, noise=0.05)
    run(budget, device, rng, 40, decodes=decodes, noise=0.0)  # the last stall was a while ago
    kv_tokens = min(LARGEST_KV, decodes * 2048)
    best = device.most_tokens(budget_s, decodes, kv_tokens)
    found = budget.prefill_tokens(decodes, kv_tokens)
    if best >= MIN_TOKENS:
        assert device.step_s(decodes, kv_tokens, found) <= 1.1 * budget_s
    if device.step_s(decodes, kv_tokens, 1) < 0.5 * budget_s and best >= 4 * MIN_TOKENS:
        # Room that is worth using is used.
        assert found >= 0.3 * best
        true_rate = found / device.step_s(decodes, kv_tokens, found)
        assert budget.has_room
        assert 0.6 * true_rate <= budget.tokens_per_s <= 1.7 * true_rate


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 1024),
            st.integers(0, 10_000_000),
            st.integers(0, 8192),
            st.one_of(st.floats(0, 100), st.sampled_from([0.0, 1e-9, 1e6])),
        ),
        max_size=60,
    ),
    budget_ms=st.floats(0.01, 10_000),
    max_tokens=st.integers(MIN_TOKENS, 8192),
)
@settings(max_examples=60, deadline=None)
def test_whatever_was_measured_it_makes_progress_within_its_bounds(
    steps: list[tuple[int, int, int, float]], budget_ms: float, max_tokens: int
) -> None:
    budget = ItlBudget(budget_ms / 1e3, max_tokens)
    largest = MIN_TOKENS / 2
    for decodes, kv_tokens, tokens, seconds in steps:
        budget.step_took(StepLoad(decodes, kv_tokens, tokens), seconds)
        largest = max(largest, tokens)
        allowed = budget.prefill_tokens(decodes, kv_tokens)
        assert MIN_TOKENS <= allowed <= max_tokens
        assert allowed <= max(MIN_TOKENS, 2 * largest)
        assert 0 <= budget.tokens_per_s < float("inf")


def test_it_begins_small_and_doubles() -> None:
    device = Device(4e-3, 20e-6, 15e-9, 0.0)
    budget = ItlBudget(0.015, MAX_TOKENS)
    taken = []
    for _ in range(4):
        assert budget.tokens_per_s == 0
        taken.append(budget.prefill_tokens(8, 8000))
        budget.step_took(StepLoad(8, 8000, taken[-1], pairs(taken[-1], 0)), device.step_s(8, 8000, taken[-1]))
    assert taken == [MIN_TOKENS, 2 * MIN_TOKENS, 4 * MIN_TOKENS, 8 * MIN_TOKENS]


@pytest.mark.parametrize("launch_ms", [0.0, 2.0, 3.5])
def test_that_few_tokens_are_no_cheaper_does_not_keep_it_at_few(launch_ms: float) -> None:
    """A step with any prompt tokens is launched in pieces, which takes a while. Who counts that to the tokens finds the
    first 32 of them so dear that it never tries more."""
    device = Device(5e-3, 20e-6, 15e-9, launch_ms / 1e3)
    budget, rng = ItlBudget(0.014, MAX_TOKENS), random.Random(8)
    for _ in range(20):
        budget.step_took(StepLoad(40, 81_920), device.step_s(40, 81_920, 0))
    run(budget, device, rng, 100, decodes=40, noise=0.02)
    best = device.most_tokens(0.014, 40, 81_920)
    assert best > 8 * MIN_TOKENS
    assert 0.6 * best <= budget.prefill_tokens(40, 81_920) <= best


@given(device=devices, decodes=st.integers(1, 200), every=st.sampled_from([16, 64, 128]), budget_ms=st.floats(12, 100))
@settings(max_examples=60, deadline=None)
def test_a_device_that_pads_gets_full_steps(device: Device, decodes: int, every: int, budget_ms: float) -> None:
    """It computes multiples of ``every`` rows. What it is given fills them, keeps to the budget and is worth a step."""
    sizes, kv_tokens, budget_s = list(range(every, 2049, every)), decodes * 1024, budget_ms / 1e3

    def step_s(tokens: int) -> float:
        rows = next((size for size in sizes if size >= decodes + tokens), decodes + tokens)
        return device.step_s(decodes, kv_tokens, rows - decodes if tokens else 0)

    budget = ItlBudget(budget_s, MAX_TOKENS, sizes)
    for _ in range(20):
        budget.step_took(StepLoad(decodes, kv_tokens), step_s(0))
    tokens = 0
    for _ in range(150):
        tokens = budget.prefill_tokens(decodes, kv_tokens)
        budget.step_took(StepLoad(decodes, kv_tokens, tokens, pairs(tokens, 0)), step_s(tokens))
    fitting = [size - decodes for size in sizes if size > decodes + MIN_TOKENS and step_s(size - decodes) <= budget_s]
    if not fitting or step_s(1) > 0.5 * budget_s or decodes + fitting[-1] == sizes[-1]:
        return  # there is hardly room, or there is for steps so large that they are not padded
    assert decodes + tokens in sizes
    assert step_s(tokens) <= 1.1 * budget_s
    assert tokens >= 0.3 * fitting[-1]


@pytest.mark.parametrize("decodes", [100, 300, 400])
@pytest.mark.parametrize("decodes_s", [0.018, 0.025])
def test_what_has_waited_does_not_crawl_where_rows_are_padded(decodes: int, decodes_s: float) -> None:
    """Prompts never pause, and there is little room beside the decodes, or none: MIN_TOKENS and twice as many may need
    the same rows, which tells nothing of what prompt tokens cost. They are to get a third of a step's time."""
    sizes = (*range(16, 128, 16), 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024)
    token_s, taken = 30e-6, []
    budget, rng = ItlBudget(0.020, MAX_TOKENS, sizes), random.Random(1)
    for _ in range(300):
        now = decodes + rng.randrange(-5, 6)
        taken.append(budget.prefill_tokens(now, now * 500, 0, waited_s=5.0))
        rows = next(size for size in sizes if size >= now + taken[-1])
        took_s = decodes_s + (rows - now) * token_s
        budget.step_took(StepLoad(now, now * 500, taken[-1], pairs(taken[-1], 0)), took_s * rng.uniform(0.98, 1.02))
    assert sum(taken[-100:]) / 100 > 0.5 * (decodes_s / 2) / token_s


def test_padding_is_no_shorter_context() -> None:
    """Few tokens late in a long prompt, on a device that pads them: what they cost for those before them is said."""
    sizes = (512, 640)
    budget = ItlBudget(0.1, MAX_TOKENS, sizes)
    decodes, context, pair_s = 490, 8_000, 100e-9

    def step_s(tokens: int, context: int) -> float:
        rows = next(size for size in sizes if size >= decodes + tokens)
        return 0.01 + (rows - decodes) * 10e-6 * (tokens > 0) + pairs(tokens, context) * pair_s

    for step in range(1000):
        tokens = (0, 24, 40, 140)[step % 4]
        budget.step_took(StepLoad(decodes, 0, tokens, pairs(tokens, context)), step_s(tokens, context))
    tokens = budget.prefill_tokens(decodes, 0, context)
    assert budget.tokens_per_s == pytest.approx(tokens / step_s(tokens, context), rel=0.15)


def test_it_counts_how_often_the_budget_was_not_kept() -> None:
    budget = ItlBudget(0.015, MAX_TOKENS)
    for decodes, tokens, seconds in ((4, 0, 0.1), (4, 10, 0.014), (4, 10, 0.016), (0, 10, 0.1), (4, 10, 0.01)):
        budget.step_took(StepLoad(decodes, 1000, tokens), seconds)
    assert (budget.mixed_steps_total, budget.over_budget_total) == (3, 1)


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.25])
def test_as_many_steps_are_too_long_as_may_be_however_times_scatter(sigma: float) -> None:
    """Step times that nobody foresees: log-normal, as those of a device that others use, too."""
    device, rng = Device(4e-3, 20e-6, 15e-9, 1e-3), random.Random(4)
    budget = ItlBudget(0.015, MAX_TOKENS)
    over, rates = [], []
    for _ in range(4000):
        tokens = budget.prefill_tokens(60, 120_000)
        seconds = device.step_s(60, 120_000, tokens) * rng.lognormvariate(0, sigma)
        budget.step_took(StepLoad(60, 120_000, tokens), seconds)
        over.append(seconds > 0.015)
        rates.append(tokens / seconds)
    assert sum(over[1000:]) / 3000 <= 0.03
    if sigma <= 0.1:  # and room that is there is used
        assert sum(rates[1000:]) / 3000 > 0.6 * device.most_tokens(0.015, 60, 120_000) / 0.015


def test_a_slow_beginning_is_tried_again() -> None:
    """Whoever sends prompts goes by what is said here: what looks slow must not stay so because nobody tries."""
    budget = ItlBudget(0.015, MAX_TOKENS)
    device = Device(4e-3, 20e-6, 15e-9, 0.0)
    for _ in range(8):
        budget.step_took(StepLoad(16, 32_768, MIN_TOKENS), 0.04)  # while something compiles
        assert budget.tokens_per_s == 0
    run(budget, device, random.Random(6), 20, decodes=16, noise=0)
    assert budget.tokens_per_s > 5_000
    for _ in range(2_000):
        budget.step_took(StepLoad(16, 32_768), device.step_s(16, 32_768, 0))
    assert budget.has_room
    assert budget.tokens_per_s == 0  # that was long ago


def test_one_that_aims_low_after_many_late_steps_has_room_again_later() -> None:
    """The decodes alone take 70 % of the budget, and times scatter."""
    device, rng = Device(5e-3, 20e-6, 50e-9, 0.0), random.Random(7)
    budget = ItlBudget(0.010, MAX_TOKENS)
    assert device.step_s(16, 40_000, 0) == pytest.approx(0.007)
    for _ in range(500):
        tokens = budget.prefill_tokens(16, 40_000)
        took_s = device.step_s(16, 40_000, tokens) * rng.lognormvariate(0, 0.25)
        budget.step_took(StepLoad(16, 40_000, tokens), took_s)
        budget.step_took(StepLoad(16, 40_000), device.step_s(16, 40_000, 0))
    assert not budget.has_room
    for _ in range(1_100):
        budget.step_took(StepLoad(16, 40_000), device.step_s(16, 40_000, 0))
    assert budget.has_room


def test_a_rough_beginning_does_not_keep_prompts_away() -> None:
    """Something else holds every third of the first steps up: then it aims so low that it offers little, and nobody who
    goes by that would send it a prompt from which it could learn better."""
    device, rng = Device(5e-3, 20e-6, 15e-9, 1e-3), random.Random(9)
    budget, decodes, kv_tokens = ItlBudget(0.014, MAX_TOKENS), 30, 61_440
    for step in range(90):
        tokens = budget.prefill_tokens(decodes, kv_tokens) if step % 2 else 0
        took_s = device.step_s(decodes, kv_tokens, tokens) * (rng.choice((1.0, 1.0, 1.7)) if tokens else 1.0)
        budget.step_took(StepLoad(decodes, kv_tokens, tokens, pairs(tokens, 0)), took_s)
    offered = budget.tokens_per_s
    assert budget.aim_s < 0.7 * 0.014
    for _ in range(100):
        budget.step_took(StepLoad(decodes, kv_tokens), device.step_s(decodes, kv_tokens, 0))
    assert budget.aim_s > 0.8 * 0.014
    assert budget.tokens_per_s > offered


def test_decodes_alone_over_the_budget_leave_no_room_but_progress() -> None:
    device = Device(30e-3, 20e-6, 15e-9, 0.0)
    budget = ItlBudget(0.015, MAX_TOKENS)
    for _ in range(10):
        budget.step_took(StepLoad(4, 8192), device.step_s(4, 8192, 0))
    assert not budget.has_room
    run(budget, device, random.Random(0), 50, decodes=4, noise=0)
    assert not budget.has_room
    assert budget.prefill_tokens(4, 8192) == MIN_TOKENS


def test_long_prompts_take_fewer_tokens_a_step_as_they_go_on() -> None:
    """Attention: after 30,000 tokens one costs 2.5 times as much."""
    device = Device(4e-3, 20e-6, 15e-9, 0.0, s_per_pair=1e-9)
    budget, rng = ItlBudget(0.015, MAX_TOKENS), random.Random(5)
    run(budget, device, rng, 600, decodes=30, noise=0.0, longest_prompt=60_000)
    took = run(budget, device, rng, 600, decodes=30, noise=0.0, longest_prompt=60_000)
    assert sum(seconds > 0.015 for seconds in took) <= 0.04 * 600
    begin, end = budget.prefill_tokens(30, 61_440, 0), budget.prefill_tokens(30, 61_440, 30_000)
    assert 1.5 * end < begin
    assert device.step_s(30, 61_440, begin, 0) <= 0.015
    assert device.step_s(30, 61_440, end, 30_000) <= 0.015
    assert end >= 0.5 * next(n for n in range(4096) if device.step_s(30, 61_440, n + 1, 30_000) > 0.015)


def test_a_stall_is_forgotten_soon() -> None:
    device = Device(4e-3, 20e-6, 15e-9, 0.0)
    budget = ItlBudget(0.015, MAX_TOKENS)
    rng = random.Random(1)
    run(budget, device, rng, 100, decodes=16, noise=0)
    before = budget.prefill_tokens(16, 32_768)
    budget.step_took(StepLoad(16, 32_768, before, pairs(before, 0)), 5.0)
    assert budget.prefill_tokens(16, 32_768) >= 0.7 * before
    run(budget, device, rng, 20, decodes=16, noise=0)
    assert budget.prefill_tokens(16, 32_768) >= 0.9 * before


def test_a_device_that_slows_down_is_followed() -> None:
    budget, rng = ItlBudget(0.02, MAX_TOKENS), random.Random(2)
    run(budget, Device(4e-3, 20e-6, 15e-9, 0.0), rng, 100, decodes=16, noise=0)
    slow = Device(8e-3, 60e-6, 30e-9, 0.0)
    run(budget, slow, rng, 60, decodes=16, noise=0)
    took = sorted(run(budget, slow, rng, 40, decodes=16, noise=0))
    assert took[-4] <= 0.022
    assert took[-1] <= 0.025


def test_a_first_step_that_compiles_is_forgotten() -> None:
    device = Device(4e-3, 20e-6, 15e-9, 0.0)
    budget, rng = ItlBudget(0.015, MAX_TOKENS), random.Random(3)
    budget.step_took(StepLoad(16, 32_768), 2.0)
    budget.step_took(StepLoad(16, 32_768, MIN_TOKENS, pairs(MIN_TOKENS, 0)), 2.0)
    run(budget, device, rng, 20, decodes=16, noise=0)
    assert budget.has_room
    assert budget.prefill_tokens(16, 32_768) >= 0.5 * device.most_tokens(0.015, 16, 32_768)
