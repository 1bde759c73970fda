"""Random loads against a pure function: whatever the pool, chunks, preemptions and aborts, outputs are the oracle's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.messages import AddRequest, FinishReason, RequestOutput
from tests.unit.fake_runner import VOCAB, make_core, make_message, oracle
from tests.unit.leaks import assert_no_leak, check_books

SHAPES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(2, 20),
        "block_size": st.sampled_from([2, 4, 8]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.one_of(st.integers(1, 24), st.just(96)),
        "itl_budget_ms": st.sampled_from([0.0, 0.2]),
        "max_model_len": st.integers(4, 48),
        "enable_prefix_caching": st.booleans(),
        "num_host_blocks": st.sampled_from([0, 1, 4, 40]),
        "host_bytes_per_s": st.sampled_from([1e12, 1e-3]),
    }
)

PREFIXES = [[(3 * i + p) % VOCAB for i in range(24)] for p in range(2)]


@st.composite
def messages(draw: st.DrawFn, index: int) -> AddRequest:
    shared = draw(st.sampled_from(PREFIXES))[: draw(st.integers(0, 24))]
    prompt = shared + draw(st.lists(st.integers(0, VOCAB - 1), min_size=not shared, max_size=6))
    return make_message(
        f"r{index}",
        prompt,
        draw(st.integers(1, 20)),
        output=draw(st.one_of(st.just([]), st.lists(st.integers(0, VOCAB - 1), max_size=4))),
        priority=draw(st.integers(0, 2)),
        cache_salt=draw(st.sampled_from(["", "tenant"])),
        stop_token_ids=draw(st.lists(st.integers(0, VOCAB - 1), max_size=2)),
        min_tokens=draw(st.integers(0, 6)),
        ignore_eos=draw(st.booleans()),
    )


@dataclass
class Client:
    """Collects what each request gets, and objects to anything after its end."""

    core: EngineCore
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, RequestOutput] = field(default_factory=dict)

    def step(self) -> None:
        for output in self.core.step().outputs:
            assert output.request_id not in self.ends, "an output after the last one"
            tokens = self.tokens.setdefault(output.request_id, [])
            assert (output.timings is not None) == (not tokens and bool(output.token_ids))
            assert (output.timings is None) == (output.cached_tokens is None)
            tokens += output.token_ids
            if output.finish_reason is not None:
                self.ends[output.request_id] = output


def is_refused(message: AddRequest, core: EngineCore) -> bool:
    num_prompt, max_tokens = len(message.prompt_token_ids), message.sampling.max_tokens
    pool_tokens = core.limits.pool_tokens
    return num_prompt + max_tokens > core.limits.max_model_len or max(1, max_tokens - 1) + num_prompt > pool_tokens


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_outputs_equal_the_oracle(data: st.DataObject) -> None:
    core = make_core(**data.draw(SHAPES))
    client = Client(core)
    added: dict[str, AddRequest] = {}
    aborted: set[str] = set()
    for index in range(data.draw(st.integers(1, 8))):
        message = data.draw(messages(index))
        core.add(message)
        added[message.request_id] = message
        for _ in range(data.draw(st.integers(0, 4))):
            client.step()
            check_books(core)
        if data.draw(st.integers(0, 5)) == 0:
            victim = data.draw(st.sampled_from(sorted(added)))
            aborted.add(victim)
            core.abort([victim, "unknown"], "client")
            check_books(core)
    steps = 0
    while core.has_work():
        client.step()
        check_books(core)
        steps += 1
        assert steps < 5000, "no progress"
    assert_no_leak(core)
    assert set(client.ends) == set(added)
    for request_id, message in added.items():
        end, tokens = client.ends[request_id], client.tokens[request_id]
        if is_refused(message, core):
            assert end.finish_reason is FinishReason.ERROR
            assert not tokens
            continue
        if len(message.output_token_ids) >= message.sampling.max_tokens:
            assert (end.finish_reason, tokens) == (FinishReason.LENGTH, [])
            continue
        expected, reason = oracle(message, core.limits.max_model_len)
        if end.finish_reason is FinishReason.ABORT:
            assert request_id in aborted
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, end.finish_reason) == (expected, reason)
            assert end.stop_token_id == (expected[-1] if reason is FinishReason.STOP else None)
    counters = core.stats()
    assert counters.max_batch_requests <= core.config.max_num_seqs
    assert counters.generation_tokens_total == sum(map(len, client.tokens.values()))


@pytest.mark.parametrize("num_blocks", [8, 11, 48])
def test_preemption_happens_and_changes_no_token(num_blocks: int) -> None:
    core = make_core(num_blocks=num_blocks, max_num_batched_tokens=8)
    client = Client(core)
    added = [make_message(f"r{i}", [i, i + 1, i + 2], 20, ignore_eos=True) for i in range(8)]
    for message in added:
        core.add(message)
    while core.has_work():
        client.step()
    assert {m.request_id: oracle(m, 64)[0] for m in added} == client.tokens
    assert (core.stats().preemptions_total > 0) == (num_blocks < 48)
    assert_no_leak(core)
