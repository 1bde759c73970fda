"""The KV cache's wire layout: odd ranges, different block sizes and dtypes on the two sides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache import KVCache

LAYERS, HEADS, DIM, TOKENS = 5, 3, 4, 50


def make_cache(block_size: int, dtype: torch.dtype = torch.float32) -> tuple[KVCache, list[int]]:
    num_blocks = -(-TOKENS // block_size) + 2
    cache = KVCache(
        num_layers=LAYERS,
        num_blocks=num_blocks,
        num_kv_heads=HEADS,
        block_size=block_size,
        head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block_size)).tolist()
    return cache, table[: -(-TOKENS // block_size)]


def tokens_of(cache: KVCache, table: list[int]) -> torch.Tensor:
    """[layer, 2, head, token, dim], read one token at a time."""
    size = cache.block_size
    return torch.stack(
        [torch.stack([layer[table[t // size], :, :, t % size] for t in range(TOKENS)], dim=2) for layer in cache.layers]
    )


def fill(cache: KVCache, table: list[int]) -> torch.Tensor:
    values = torch.randn(LAYERS, 2, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0)).to(cache.dtype)
    for token in range(TOKENS):
        for layer in range(LAYERS):
            block = table[token // cache.block_size]
            cache.layers[layer][block, :, :, token % cache.block_size] = values[layer, :, :, token]
    return values


@given(
    tokens=st.tuples(st.integers(0, TOKENS), st.integers(0, TOKENS)).map(sorted),
    layers=st.tuples(st.integers(0, LAYERS), st.integers(0, LAYERS)).map(sorted),
    block_sizes=st.tuples(st.sampled_from([1, 7, 16, 50]), st.sampled_from([3, 16, 64])),
    dtypes=st.tuples(*[st.sampled_from([torch.float32, torch.bfloat16, torch.float16])] * 3),
)
def test_a_range_arrives_and_nothing_else_changes(tokens, layers, block_sizes, dtypes) -> None:
    sender, sender_table = make_cache(block_sizes[0], dtypes[0])
    receiver, receiver_table = make_cache(block_sizes[1], dtypes[1])
    values = fill(sender, sender_table)
    wire = dtypes[2]
    staging = torch.full((1 << 15,), 0xAB, dtype=torch.uint8)
    num_bytes = sender.pack(sender_table, *tokens, *layers, staging, wire)
    assert num_bytes == (layers[1] - layers[0]) * 2 * HEADS * (tokens[1] - tokens[0]) * DIM * wire.itemsize
    assert (staging[num_bytes:] == 0xAB).all()
    sent = values[layers[0] : layers[1], :, :, tokens[0] : tokens[1]].to(wire)
    assert torch.equal(staging[:num_bytes].view(wire).view(sent.shape), sent) or not num_bytes

    receiver.unpack(receiver_table, *tokens, *layers, staging[:num_bytes], wire)
    expected = torch.zeros(LAYERS, 2, HEADS, TOKENS, DIM, dtype=dtypes[1])
    expected[layers[0] : layers[1], :, :, tokens[0] : tokens[1]] = sent.to(dtypes[1])
    assert torch.equal(tokens_of(receiver, receiver_table), expected)
    untouched = set(range(receiver.num_blocks)) - set(receiver_table)
    assert all((layer[list(untouched)] == 0).all() for layer in receiver.layers)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_taken(kind) -> None:
    sender, table = make_cache(16)
    fill(sender, table)
    staging = torch.empty(1 << 15, dtype=torch.uint8)
    num_bytes = sender.pack(table, 3, 40, 1, 4, staging, torch.bfloat16)
    payload = staging[:num_bytes].numpy().tobytes()
    receiver, receiver_table = make_cache(7)
    receiver.unpack(receiver_table, 3, 40, 1, 4, kind(payload), torch.bfloat16)
    ours = tokens_of(receiver, receiver_table)[1:4, :, :, 3:40]
    assert torch.equal(ours, tokens_of(sender, table)[1:4, :, :, 3:40].bfloat16().float())


def test_what_does_not_fit_is_an_error() -> None:
    cache, table = make_cache(16)
    with pytest.raises(ValueError, match="staging buffer has 8 bytes"):
        cache.pack(table, 0, 1, 0, 1, torch.empty(8, dtype=torch.uint8), torch.float32)
    with pytest.raises(ValueError, match="payload has 8 bytes, 96 are expected"):
        cache.unpack(table, 0, 1, 0, 1, bytes(8), torch.float32)
    with pytest.raises(ValueError, match="not within the 4 blocks"):
        cache.pack(table, 0, 65, 0, 1, torch.empty(1 << 16, dtype=torch.uint8), torch.float32)


def test_size_is_what_the_plan_counts() -> None:
    cache, _ = make_cache(16, torch.bfloat16)
    assert cache.num_bytes == cache.num_blocks * KVCache.bytes_per_block(LAYERS, HEADS, 16, DIM, torch.bfloat16)
