"""The drawing of the time to the first token."""

from __future__ import annotations

import io

from rich.console import Console

from pdserve.up.timing import PHASES, RequestTimes, bar, draw


def body(**changes: float) -> dict[str, object]:
    phases = dict.fromkeys(PHASES, 0.01) | {"prefill_s": 0.120, "rest_s": 0.004} | changes
    ttft_s = sum(phases.values())
    return {
        "phases": phases,
        "ttft_s": ttft_s,
        "e2e_s": ttft_s + 0.5,
        "output_tokens": 11,
        "cached_tokens": 16,
        "sent_kv_tokens": 27,
    }


def drawn(times: RequestTimes) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(draw(times))
    return out.getvalue()


def test_every_phase_has_a_row_with_its_time_and_share() -> None:
    text = drawn(RequestTimes.from_json(body()))
    for label in PHASES.values():
        assert label in text
    assert "Time to the first token: 184.0 ms" in text
    assert "120.0 ms" in text
    assert "65.2%" in text
    assert "20.0 tokens/s" in text
    assert "2.2%" in text, "the rest's"
    assert "KV of 27 tokens handed off, 16 cached" in " ".join(text.split())


def test_the_bars_lie_one_after_the_other() -> None:
    assert bar(0.0, 1.0, 1.0) == "█" * 36
    assert bar(0.0, 0.5, 1.0).rstrip() == "█" * 18
    assert bar(0.5, 0.5, 1.0) == " " * 18 + "█" * 18
    assert bar(0.0, 0.0, 1.0).strip() == ""
    assert bar(1.0, 1e-9, 1.0).strip() != ""
    assert all(len(bar(begin / 10, 0.37, 1.0)) == 36 for begin in range(11))


def test_missing_values_draw_as_nothing() -> None:
    times = RequestTimes.from_json(
        {"phases": {}, "ttft_s": 0, "e2e_s": None, "output_tokens": 0, "cached_tokens": None, "sent_kv_tokens": None}
    )
    assert times.tokens_per_s == 0.0
    assert "0.0 ms" in drawn(times)
