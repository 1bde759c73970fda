"""Packed steps against ``build_forward_batch``, over random lives of requests; the block table by its changes alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from engine.batch import ScheduledBatch, ScheduledItem, build_forward_batch
from engine.gpu_batch import PackedStep, RequestSlots, StepLayout, pack_step
from engine.kernels.noise import noise_key, splitmix64_array
from engine.messages import FinishReason, SamplingParams
from engine.request import Request, RequestStatus

BLOCK = 4


def make_request(index: int, num_prompt: int, **sampling: object) -> Request:
    request = Request(
        request_id=f"r{index}",
        prompt_token_ids=[index * 100 + i for i in range(num_prompt)],
        output_token_ids=[],
        sampling=SamplingParams(max_tokens=50, **sampling),  # type: ignore[arg-type]
        arrival_s=0.0,
        deadline_s=1.0,
        arrival_index=index,
    )
    request.transition(RequestStatus.RUNNING)
    return request


def grow(request: Request, end: int, pool: list[int]) -> None:
    while len(request.block_table) * BLOCK < end:
        request.block_table.append(pool.pop())


def packed(
    items: list[ScheduledItem], slots: RequestSlots, layout: StepLayout
) -> tuple[PackedStep, dict[str, np.ndarray]]:
    block = np.full(layout.words, 77, np.int32)
    step = pack_step(ScheduledBatch(items, 1), slots, layout, block)
    return step, layout.arrays(block)


@pytest.mark.parametrize("seed", range(20))
def test_a_packed_step_is_the_forward_batch(seed: int) -> None:
    rng = random.Random(seed)
    slots = RequestSlots(num_slots=6, max_blocks=16, block_size=BLOCK)
    device_table = np.zeros_like(slots.table)
    pool = list(range(1, 400))
    running: list[Request] = []
    made = 0
    for _ in range(40):
        for request in list(running):
            if request.num_tokens > 40 or rng.random() < 0.1:
                running.remove(request)
                request.transition(RequestStatus.FINISHED)
                request.finish_reason = FinishReason.ABORT
            elif rng.random() < 0.1:  # preempted and resumed: other blocks, from the start
                request.block_table, request.num_computed_tokens = [], 0
        while len(running) < 6 and rng.random() < 0.7:
            running.append(make_request(made, rng.randint(1, 12)))
            made += 1
        chosen = [request for request in running if rng.random() < 0.8]
        if not chosen:
            continue
        items = []
        for request in chosen:
            start = request.num_computed_tokens
            num_tokens = rng.randint(1, request.num_tokens - start)
            grow(request, start + num_tokens, pool)
            items.append(ScheduledItem(request, num_tokens, start, start + num_tokens == request.num_tokens))
        items.sort(key=lambda item: item.num_tokens > 1)
        total = sum(item.num_tokens for item in items)
        layout = StepLayout(total + rng.randint(0, 5), len(items) + rng.randint(0, 3))
        step, got = packed(items, slots, layout)
        at, ids = slots.take_changes()
        device_table.reshape(-1)[at] = ids

        want = build_forward_batch(ScheduledBatch(items, 1), BLOCK, torch.device("cpu"))
        count = len(items)
        assert (step.num_requests, step.num_tokens, step.max_q_len) == (count, total, want.max_q_len)
        assert step.num_decodes == sum(item.num_tokens == 1 for item in items)
        for name, padding in (("token_ids", 0), ("positions", 0), ("slot_mapping", -1)):
            assert got[name][:total].tolist() == getattr(want, name).tolist(), name
            assert set(got[name][total:].tolist()) <= {padding}
        assert got["cu_seqlens_q"][: count + 1].tolist() == want.cu_seqlens_q.tolist()
        assert set(got["cu_seqlens_q"][count + 1 :].tolist()) <= {total}
        assert got["seq_lens"].tolist() == want.seq_lens.tolist() + [0] * (layout.rows - count)
        assert got["logits_index"][: len(step.sampled)].tolist() == want.logits_index.tolist()
        assert got["slots"][count:].tolist() == [slots.num_slots] * (layout.rows - count)
        for row in range(count):
            used = -(-int(want.seq_lens[row]) // BLOCK)
            assert device_table[got["slots"][row], :used].tolist() == want.block_table[row, :used].tolist()
        for item in items:
            item.request.num_computed_tokens = item.start + item.num_tokens
            if item.needs_sample:
                item.request.append_token(rng.randint(0, 9))
    assert made > 6, "slots were given to other requests"


def test_steady_decoding_changes_only_new_blocks() -> None:
    slots, pool = RequestSlots(4, 16, BLOCK), list(range(100))
    request = make_request(0, 3)
    for length in range(3, 10):
        grow(request, length, pool)
        packed([ScheduledItem(request, 1, length - 1, True)], slots, StepLayout(1, 1))
        at, ids = slots.take_changes()
        assert len(at) == len(ids) == (length == 3 or (length - 1) % BLOCK == 0)
        request.append_token(length)


def test_a_token_that_is_still_being_drawn_is_its_slots() -> None:
    slots, pool = RequestSlots(4, 16, BLOCK), list(range(100))
    first, second = make_request(0, 3), make_request(1, 5)
    for request in (first, second):
        grow(request, 6, pool)
    step, got = packed([ScheduledItem(first, 1, 3, True), ScheduledItem(second, 1, 4, True)], slots, StepLayout(2, 2))
    assert got["token_ids"].tolist() == [-1 - step.slots[0], 104]


def test_keys_are_those_of_the_noise() -> None:
    slots, pool = RequestSlots(4, 16, BLOCK), list(range(100))
    seeds = [0, 3, 2**63 + 5, -1]
    requests = [make_request(i, 2, temperature=0.5, seed=seed) for i, seed in enumerate(seeds)]
    for request in requests:
        request.append_token(7)
        grow(request, 3, pool)
    items = [ScheduledItem(request, 1, 2, True) for request in requests]
    step, got = packed(items, slots, StepLayout(4, 4))
    assert (step.greedy, step.cut) == (False, False)
    assert got["temperature"].view(np.float32).tolist() == [0.5] * 4
    keys = got["keys"].view(np.uint32).reshape(4, 2)
    assert [tuple(key) for key in keys.tolist()] == [noise_key(seed, 1) for seed in seeds]
    assert splitmix64_array(np.array([5], np.uint64)).dtype == np.uint64


def test_only_what_is_asked_for_is_special() -> None:
    slots, pool = RequestSlots(4, 16, BLOCK), list(range(100))
    requests = [make_request(0, 2), make_request(1, 2, logprobs=0), make_request(2, 2, top_k=3, temperature=1.0)]
    for request in requests:
        grow(request, 2, pool)
    items = [ScheduledItem(request, 2, 0, True) for request in requests]
    step, _ = packed(items, slots, StepLayout(6, 3))
    assert step.special == [1]
    assert step.cut
    assert not step.greedy
