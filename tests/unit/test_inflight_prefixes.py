from __future__ import annotations

from engine.inflight_prefixes import InflightPrefixes
from engine.messages import SamplingParams
from engine.request import Request

A, B, C = (bytes([value]) * 16 for value in range(3))


def make_request(*block_hashes: bytes) -> Request:
    request = Request("r", [1], [], SamplingParams(max_tokens=1), 0.0, 1.0)
    request.block_hashes = list(block_hashes)
    return request


def test_a_hold_ends_with_the_last_shared_block() -> None:
    inflight, claimant, other = InflightPrefixes(), make_request(A, B), make_request(A, B, C)
    inflight.claim(claimant, [A, B])
    assert inflight.hold(other, [A, B, C])
    assert inflight.published(A) == []
    assert inflight.published(B) == [other]
    assert not inflight.hold(other, [C])
    assert inflight.is_empty()


def test_a_claimant_that_gives_up_lets_go() -> None:
    inflight, claimant, first, second = InflightPrefixes(), make_request(A, B), make_request(A), make_request(A, B)
    inflight.claim(claimant, [A, B])
    assert inflight.hold(first, [A])
    assert inflight.hold(second, [A, B])
    assert inflight.give_up(claimant) == [first, second]
    assert inflight.is_empty()


def test_the_first_claimant_counts() -> None:
    inflight, first, second, other = InflightPrefixes(), make_request(A), make_request(A), make_request(A)
    inflight.claim(first, [A])
    inflight.claim(second, [A])
    assert inflight.hold(other, [A])
    assert inflight.give_up(second) == []
    assert inflight.give_up(first) == [other]


def test_a_held_request_can_end() -> None:
    inflight, claimant, other = InflightPrefixes(), make_request(A), make_request(A)
    inflight.claim(claimant, [A])
    assert inflight.hold(other, [A])
    assert inflight.forget(other)
    assert not inflight.forget(other)
    assert inflight.published(A) == []
    assert inflight.is_empty()
