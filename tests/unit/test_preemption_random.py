"""Pools that are too small, at random: preempted requests get on, whether their KV waits in host memory or is lost.

The laws: the oldest request is never preempted for a younger one; whoever came back emits a token before it is
preempted again (so re-prefills cannot lock an engine up); every output is the oracle's; nothing is left, in either
memory. The oracle is a pure function, and the fake runner reads every token's KV back before it draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.messages import AddRequest
from engine.request import Request
from tests.unit.fake_async_runner import make_async_core
from tests.unit.fake_runner import VOCAB, make_core, make_message, oracle
from tests.unit.leaks import assert_no_leak, check_books

SHAPES = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from([2, 4]),
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.one_of(st.integers(2, 16), st.just(64)),
        "itl_budget_ms": st.sampled_from([0.0, 0.2]),
        "enable_prefix_caching": st.booleans(),
        "num_host_blocks": st.sampled_from([0, 3, 40]),
        "host_bytes_per_s": st.sampled_from([1e12, 1e-3]),  # copies cost nothing, or all there is
    }
)


class Witness:
    """Stands at ``Scheduler._preempt`` and objects."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.times: Counter[str] = Counter()
        self._num_tokens: dict[str, int] = {}
        """When last preempted."""
        self._really: Callable[[Request], None] = core.scheduler._preempt
        core.scheduler._preempt = self  # type: ignore[method-assign]

    def __call__(self, request: Request) -> None:
        others = [other for other in self.core.scheduler.running if other is not request]
        assert all(other.order < request.order for other in others), "it was preempted for a younger one"
        assert others, "alone it has room: what could never fit was refused"
        before = self._num_tokens.get(request.request_id, 0)
        assert request.num_tokens > before, "it came back, and was preempted before it got on"
        self._num_tokens[request.request_id] = request.num_tokens
        self.times[request.request_id] += 1
        self._really(request)


def run(core: EngineCore, added: list[AddRequest], gaps: list[int]) -> Witness:
    witness = Witness(core)
    tokens: dict[str, list[int]] = {message.request_id: [] for message in added}
    waiting = list(zip(added, gaps, strict=True))
    # Each step computes a token of the oldest request at least, and it is never set back.
    bound = sum(2 * (len(m.prompt_token_ids) + m.sampling.max_tokens) + gap for m, gap in waiting) + 10
    pause = 0
    for _ in range(bound):
        if waiting and pause == 0:
            message, pause = waiting.pop(0)
            core.add(message)
        pause = max(0, pause - 1)
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
        check_books(core)
        if not waiting and not core.has_work():
            break
    else:
        raise AssertionError(f"not over after {bound} steps")
    assert tokens == {message.request_id: oracle(message, core.limits.max_model_len)[0] for message in added}
    assert_no_leak(core)
    return witness


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([make_core, make_async_core]))
def test_the_preempted_get_on(data: st.DataObject, make: Callable[..., EngineCore]) -> None:
    shape = data.draw(SHAPES)
    shared = data.draw(st.booleans())
    added = []
    for index in range(data.draw(st.integers(2, 7))):
        prompt = [(3 * i + (0 if shared else index)) % VOCAB for i in range(data.draw(st.integers(1, 16)))]
        added.append(make_message(f"r{index}", prompt, data.draw(st.integers(1, 20)), ignore_eos=True))
    longest = max(len(m.prompt_token_ids) + m.sampling.max_tokens for m in added)
    num_blocks = -(-longest // shape["block_size"]) + data.draw(st.integers(1, 4))
    core = make(num_blocks=num_blocks, max_model_len=64, **shape)
    run(core, added, data.draw(st.lists(st.integers(0, 4), min_size=len(added), max_size=len(added))))


@pytest.mark.parametrize("make", [make_core, make_async_core])
@pytest.mark.parametrize(
    ("num_host_blocks", "bytes_per_s", "is_offloaded"), [(40, 1e12, True), (0, 1e12, False), (40, 1e-3, False)]
)
def test_the_cost_model_chooses(
    make: Callable[..., EngineCore], num_host_blocks: int, bytes_per_s: float, is_offloaded: bool
) -> None:
    """Offloaded KV comes back as it was: no token of the request is computed twice. Else it is computed again."""
    core = make(num_blocks=8, num_host_blocks=num_host_blocks, host_bytes_per_s=bytes_per_s)
    added = [make_message(f"r{i}", [i, i + 1, i + 2], 20, ignore_eos=True) for i in range(4)]
    witness = run(core, added, [0] * 4)
    assert witness.times, "the pool was to be too small"
    stats = core.stats()
    assert stats.preemptions_total == witness.times.total()
    assert (stats.offloaded_blocks_total > 0) == is_offloaded
    assert (stats.restored_blocks_total > 0) == is_offloaded
    assert stats.offloaded_bytes_total == stats.offloaded_blocks_total  # a block is a byte here
    computed = sum(num_tokens for batch in core.runner.batches for _, _, num_tokens in batch)  # type: ignore[attr-defined]
    once = sum(len(m.prompt_token_ids) + m.sampling.max_tokens - 1 for m in added)
    assert (computed == once) == is_offloaded


@pytest.mark.parametrize("make", [make_core, make_async_core])
def test_ended_while_it_waits_in_host_memory(make: Callable[..., EngineCore]) -> None:
    """Aborted, or past its deadline: the slots are free at once."""
    now_s = [0.0]
    core = make(num_blocks=8, num_host_blocks=40, clock=lambda: now_s[0])
    for i in range(4):
        core.add(make_message(f"r{i}", [i, i + 1, i + 2], 20, ignore_eos=True, timeout_s=50.0 + i))
    waiting: list[Request] = []
    while len(waiting) < 2:
        core.step()
        now_s[0] += 0.01
        waiting = [request for request in core.scheduler.preempted if request.host_slots]
    assert core.stats().host_blocks == sum(len(request.host_slots) for request in waiting) > 0
    core.abort([waiting[0].request_id], "client")
    check_books(core)
    now_s[0] = waiting[1].deadline_s
    core.step()
    check_books(core)
    assert core.stats().host_blocks == 0 or waiting[1] not in core.scheduler.preempted
    core.abort([f"r{i}" for i in range(4)], "client")
    while core.has_work():
        core.step()
    assert_no_leak(core)
