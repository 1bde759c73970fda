"""The model runner and the batch it builds: layer groups, limits, what a step's tensors hold."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.batch import ScheduledBatch, ScheduledItem, build_forward_batch
from engine.config import EngineConfig
from engine.model_runner import ModelRunner
from tests.unit.engine_driver import Driver, make_request
from tests.unit.test_models_parity import prompts, save_tiny_model

BLOCK_SIZE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_model("llama", directory)
    return str(directory)


def make_runner(model: str, **config) -> ModelRunner:
    return ModelRunner(EngineConfig(**{"model": model, "num_blocks": 20, "block_size": 16, **config}))


# ---- the batch


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 4), st.integers(0, 100)), min_size=1, max_size=5), st.data()
)
def test_forward_batch_is_the_naive_one(shapes, data) -> None:
    items, token_ids, positions, slots, logits_index = [], [], [], [], []
    next_block = 0
    for num_prompt, num_output, start in shapes:
        request = make_request(list(range(num_prompt)), list(range(100, 100 + num_output)))
        start %= request.num_tokens
        num_tokens = data.draw(st.integers(1, request.num_tokens - start))
        num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
        # Reversed, and one more than this step needs.
        request.block_table = list(range(next_block + num_blocks, next_block - 1, -1))
        next_block += num_blocks + 1
        items.append(ScheduledItem(request, num_tokens, start, start + num_tokens == request.num_tokens))
        for position in range(start, start + num_tokens):
            token_ids.append(request.all_token_ids[position])
            positions.append(position)
            slots.append(request.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
        if items[-1].needs_sample:
            logits_index.append(len(token_ids) - 1)
    batch = build_forward_batch(ScheduledBatch(items, 0), BLOCK_SIZE, torch.device("cpu"))
    assert batch.token_ids.tolist() == token_ids
    assert batch.positions.tolist() == positions
    assert batch.slot_mapping.tolist() == slots
    assert batch.logits_index.tolist() == logits_index
    assert batch.seq_lens.tolist() == [item.start + item.num_tokens for item in items]
    assert batch.cu_seqlens_q.diff().tolist() == [item.num_tokens for item in items]
    assert batch.max_q_len == max(item.num_tokens for item in items)
    assert (batch.num_tokens, batch.num_requests) == (len(token_ids), len(items))
    for item, row in zip(items, batch.block_table.tolist(), strict=True):
        used = -(-(item.start + item.num_tokens) // BLOCK_SIZE)
        assert row[:used] == item.request.block_table[:used]
        assert not any(row[used:])


# ---- the runner


@pytest.mark.parametrize(("group", "expected"), [(1, [(0, 1), (1, 2), (2, 3)]), (2, [(0, 2), (2, 3)]), (8, [(0, 3)])])
def test_layers_are_announced_in_groups_once_their_kv_is_written(model, group, expected) -> None:
    runner = make_runner(model, layer_group_size=group)
    request = make_request(prompts()[2])
    request.block_table = [3, 1, 2]
    announced = []

    def on_layers(start: int, end: int) -> None:
        announced.append((start, end))
        for layer, kv in enumerate(runner.kv_cache.layers):
            assert bool(kv[request.block_table].any()) == (layer < end)

    sampled = runner.run(ScheduledBatch([ScheduledItem(request, request.num_tokens, 0, True)], 0), on_layers)
    assert announced == expected
    assert sampled.token_ids[0] is not None
    assert sampled.logprobs == [None]


def test_a_chunk_that_does_not_end_the_prompt_draws_nothing(model) -> None:
    request = make_request(prompts()[2], logprobs=2)
    request.block_table = [0]
    sampled = make_runner(model).run(ScheduledBatch([ScheduledItem(request, 5, 0, False)], 0))
    assert sampled.token_ids == [None]
    assert sampled.logprobs == [None]


def test_kv_handed_to_another_cache_continues_the_same(model) -> None:
    """What a hand-off does: pack here, unpack there, into other blocks of another size."""
    prompt = prompts()[2]
    whole = make_request(prompt)
    sender = make_runner(model)
    Driver(sender).generate([whole], 8)
    receiver = make_runner(model, block_size=32)
    moved = make_request(prompt, whole.output_token_ids[:1])
    moved.block_table = [7, 2]
    staging = torch.empty(1 << 20, dtype=torch.uint8)
    for layers in ((0, 2), (2, 3)):
        for tokens in ((0, 11), (11, len(prompt))):
            size = sender.kv_cache.pack(whole.block_table, *tokens, *layers, staging, torch.float32)
            receiver.kv_cache.unpack(moved.block_table, *tokens, *layers, staging[:size], torch.float32)
    moved.num_computed_tokens = len(prompt)
    driver = Driver(receiver)
    driver._free.remove(7)
    driver._free.remove(2)
    driver.generate([moved], 8)
    assert moved.output_token_ids == whole.output_token_ids


def test_limits(model) -> None:
    assert make_runner(model).max_model_len == 256
    assert make_runner(model, max_model_len=100).max_model_len == 100
    with pytest.raises(ValueError, match="--max-model-len 256 or less"):
        make_runner(model, max_model_len=257)
    block_bytes = 3 * 2 * 2 * 16 * 16 * 4
    sized = make_runner(model, num_blocks=None, kv_cache_bytes=10 * block_bytes + 1)
    assert (sized.num_blocks, sized.kv_cache.num_bytes) == (10, 10 * block_bytes)
    assert make_runner(model, num_blocks=None, max_num_seqs=2).num_blocks == 2 * 256 // 16
    with pytest.raises(ValueError, match="use --kv-cache-bytes"):
        make_runner(model, num_blocks=None, kv_cache_bytes=block_bytes)
    for wrong, remedy in (
        ("block_size", "use --block-size 16"),
        ("num_blocks", "--num-blocks"),
        ("num_threads", "--num-t"),
    ):
        with pytest.raises(ValueError, match=remedy):
            make_runner(model, **{wrong: 0})


def test_identity(model) -> None:
    one, other = make_runner(model), make_runner(model, dtype="bfloat16", block_size=32)
    assert one.model_fingerprint == other.model_fingerprint
    assert one.vocab_size == 320
    assert (one.dtype, other.dtype) == (torch.float32, torch.bfloat16)
