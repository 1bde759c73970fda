"""Names of a prompt's blocks: the same however they are asked for, and no more than are needed."""

from __future__ import annotations

import random

from engine.block_hash import hash_tokens, root_hash
from pdserve.v1 import inference_pb2 as pb
from registry.kv_events import Batch, Cleared, Stored, join
from router.chain_memo import PART_UNITS, ChainMemo
from router.prefix_index import PrefixIndex
from router.prompt import FIRST_UNITS, RoutedPrompt

KIND = ("model", 2)
LONG = list(range(4 * FIRST_UNITS))


def all_hashes(token_ids: list[int], salt: str = "") -> list[bytes]:
    return hash_tokens(token_ids, 2, root_hash("model", salt))


def index_of(stride: int, **owned: list[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for worker_id, hashes in owned.items():
        index.meet(worker_id, stride)
        index.apply(worker_id, Batch(1, 1, [Cleared(), Stored(join(hashes[stride - 1 :: stride]))]))
    return index


def test_prompt_and_output_are_named_as_a_worker_names_them() -> None:
    request = pb.GenerateRequest(
        prompt_token_ids=[1, 2, 3, 4],
        sampling=pb.SamplingParams(max_tokens=10),
        cache_salt="tenant",
        group="g",
        session="s",
    )
    prompt = RoutedPrompt.of(request, [5, 6, 7])
    assert (prompt.num_tokens, prompt.max_new_tokens, prompt.group, prompt.session) == (7, 7, "g", "s")
    assert prompt.hashes(KIND) == all_hashes([1, 2, 3, 4, 5, 6], "tenant")


def test_the_last_token_is_never_part_of_a_cached_prefix() -> None:
    assert RoutedPrompt(token_ids=[1, 2, 3, 4]).hashes(KIND) == all_hashes([1, 2])
    assert RoutedPrompt(token_ids=[1]).hashes(KIND) == []


def test_hashing_in_parts_gives_the_same_names() -> None:
    prompt = RoutedPrompt(token_ids=LONG)
    assert prompt.hashes(KIND, 3) == all_hashes(LONG)[:3]
    assert prompt.hashes(KIND, 100) == all_hashes(LONG)[:100]
    assert prompt.hashes(KIND) == all_hashes(LONG[:-1])
    assert len(prompt.hashes(KIND, 5)) == 2 * FIRST_UNITS - 1


def test_the_rest_of_a_long_prompt_is_hashed_only_if_somebody_has_its_beginning() -> None:
    hashes = all_hashes(LONG)
    for stride in (1, 4):
        some = index_of(stride, short=hashes[:100], long=hashes[: FIRST_UNITS + 100])
        prompt = RoutedPrompt(token_ids=LONG)
        assert prompt.find_cached(KIND, some) == {"short": 100, "long": FIRST_UNITS + 100}
        cold = RoutedPrompt(token_ids=LONG)
        assert cold.find_cached(KIND, index_of(stride, short=hashes[:100])) == {"short": 100}
        assert len(cold.hashes(KIND, 0)) == FIRST_UNITS


def test_remembered_names_are_those_that_hashing_gives() -> None:
    """Prompts that share parts, or seem to: other beginnings, other units, other tenants; with room for few parts."""
    rng = random.Random(3)
    for max_bytes in (1 << 26, 40_000, 0):
        memo = ChainMemo(max_bytes)
        prompts = [[rng.randrange(3) for _ in range(2 * PART_UNITS)] * rng.randrange(1, 5) for _ in range(6)]
        for _ in range(60):
            tokens = rng.choice(prompts) + rng.choice(prompts) + [1] * rng.randrange(5)
            kind, salt = rng.choice([KIND, ("model", 4), ("other", 2)]), rng.choice(["", "tenant"])
            prompt = RoutedPrompt(token_ids=tokens, cache_salt=salt)
            prompt.hashes(kind, rng.randrange(600), memo)
            assert prompt.hashes(kind, None, memo) == hash_tokens(tokens[:-1], kind[1], root_hash(kind[0], salt))
            assert memo._bytes <= max_bytes
            assert memo._bytes == sum(memo._size(key) for key in memo._parts)
