"""bench.pair_sim against what is known without it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.pair_sim import HANDOFF_S, Flight, Pair
from bench.serve.arrivals import arrivals_s


def flights(count: int, rate: float, prompt_tokens: int = 2048) -> list[Flight]:
    return [Flight(time_s, prompt_tokens, 64) for time_s in itertools.islice(arrivals_s(rate, 1.0, 7), count)]


def test_without_help_prompts_wait_in_one_line() -> None:
    """One server with a constant service time: the waits follow from the arrivals alone (Lindley)."""
    alone, *_ = one = flights(1, 1.0)
    Pair(0, 1).run(one)
    service_s = alone.ttft_s - HANDOFF_S
    many = flights(200, 16.0)
    Pair(0, 1).run(many)
    wait_s, before_s = 0.0, many[0].arrival_s
    for flight in many:
        wait_s = max(0.0, wait_s + service_s - (flight.arrival_s - before_s)) if flight is not many[0] else 0.0
        before_s = flight.arrival_s
        assert flight.ttft_s == pytest.approx(wait_s + service_s + HANDOFF_S)


def test_help_shortens_the_queue_and_every_token_is_drawn() -> None:
    plain, helped = flights(300, 18.0), flights(300, 18.0)
    pair = Pair(14, 1)
    Pair(0, 1).run(plain)
    pair.run(helped)
    for flight in (*plain, *helped):
        assert (flight.done, flight.drawn, len(flight.itl_s)) == (2048, 64, 63)
    assert sum(load.prefill_tokens for load, _ in pair.steps) == 2048 * sum(flight.is_helped for flight in helped)
    waits = [np.percentile([flight.ttft_s for flight in part], 95) for part in (plain, helped)]
    assert waits[1] < 0.8 * waits[0]
