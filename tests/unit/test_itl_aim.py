"""The aim below the ITL budget, against times that scatter by a known distribution."""

from __future__ import annotations

import random
from statistics import NormalDist

import pytest

from engine.itl_aim import MOST, Aim


def exceeding(aim: Aim, rng: random.Random, sigma: float, steps: int, mixed_every: int) -> float:
    """Share of the mixed steps that are longer than the budget, when each takes what it aims at times a log-normal."""
    over = []
    for step in range(steps):
        is_mixed = step % mixed_every == 0
        if is_mixed:
            expected_s = aim.part
            took_s = expected_s * rng.lognormvariate(0, sigma)
            aim.observe(expected_s, took_s)
            over.append(took_s > 1)
        aim.stepped(is_mixed=is_mixed)
    return sum(over) / len(over)


@pytest.mark.parametrize(("mixed_every", "allowed"), [(1, 0.01), (3, 0.03), (40, 0.05)])
def test_of_all_steps_one_in_a_hundred_may_be_too_long(mixed_every: int, allowed: float) -> None:
    """The rarer the mixed steps, the more of them; but no more than one in twenty."""
    sigma, rng, aim = 0.1, random.Random(3), Aim()
    exceeding(aim, rng, sigma, 1_000 * mixed_every, mixed_every)
    assert 0.4 * allowed <= exceeding(aim, rng, sigma, 6_000 * mixed_every, mixed_every) <= 1.6 * allowed
    # So many exceed the median by that factor.
    assert 1 / aim.part == pytest.approx(pow(2.718281828, sigma * NormalDist().inv_cdf(1 - allowed)), rel=0.07)


def test_it_keeps_a_little_off_where_nothing_scatters_and_starts_further_off() -> None:
    aim = Aim()
    first = aim.part
    assert first < MOST
    for _ in range(200):
        aim.observe(0.01, 0.01)
        aim.stepped(is_mixed=True)
    assert aim.part == MOST
    aim.forget()
    assert aim.part <= first


@pytest.mark.parametrize("stall_s", [0.015, 0.1])
def test_a_few_stalls_among_many_steps_do_not_decide(stall_s: float) -> None:
    """An ITL at p99 is asked for: what is rarer than one in a hundred may be."""
    aim, rng = Aim(), random.Random(1)
    for step in range(2_000):
        aim.observe(0.01, 0.01 * rng.uniform(0.98, 1.02) if step % 200 else stall_s)
        aim.stepped(is_mixed=True)
    assert aim.part > 0.9


def test_stalls_that_no_aim_would_mend_do_not_lower_it() -> None:
    aim = Aim()
    for step in range(500):
        aim.observe(0.01, 0.01 if step % 5 else 1.0)
        aim.stepped(is_mixed=True)
    assert aim.part == MOST
