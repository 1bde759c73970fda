"""The drawing of one request over its processes."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from pdserve.trace import bars_of, draw_list, draw_processes, list_recent


def record(**changes: Any) -> dict[str, Any]:
    return {
        "phases": {
            "tokenize_s": 0.01,
            "route_s": 0.02,
            "prefill_queue_s": 0.03,
            "handoff_wait_s": 0.0,
            "prefill_s": 0.4,
            "transfer_s": 0.05,
            "relay_s": 0.06,
            "rest_s": 0.03,
        },
        "ttft_s": 0.6,
        "e2e_s": 1.0,
        "prompt_tokens": 50,
        "output_tokens": 9,
        "cached_tokens": 16,
        "resumes": 0,
        "trace_id": "",
        "router": "router-1",
        "attempts": [
            {"prefill_worker": "p0", "decode_worker": "d0", "start_s": 0.02, "duration_s": 0.0, "failure": ""}
        ],
        "transfer": {"lane": "shm", "seconds": 0.3, "bytes": 3_000_000, "cached_tokens": 32},
    } | changes


def test_each_bar_begins_where_what_it_waited_for_ends() -> None:
    bars = {(item.process, item.what): item for item in bars_of(record())}
    assert bars["gateway", "request"].duration_s == 1.0
    assert bars["router-1", "attempt 1"].begin_s == pytest.approx(0.03)
    assert bars["p0", "queue"].begin_s == pytest.approx(0.03)
    assert bars["p0", "prefill"].begin_s == pytest.approx(0.06)
    assert ("p0", "hand-off wait") not in bars
    transfer = bars["d0", "transfer"]
    assert transfer.begin_s + transfer.duration_s == pytest.approx(0.51)  # 0.05 of it after the prefill
    assert transfer.note == "shm, 3.0 MB, 0.01 GB/s, 32 tokens cached"
    decode = bars["d0", "decode"]
    assert (decode.begin_s, decode.duration_s) == (0.6, pytest.approx(0.4))


def test_failed_attempts_and_a_local_prefill() -> None:
    attempts = [
        {"prefill_worker": "p0", "decode_worker": "d0", "start_s": 0.0, "duration_s": 0.2, "failure": "WORKER_LOST"},
        {"prefill_worker": "", "decode_worker": "d1", "start_s": 0.3, "duration_s": 0.0, "failure": ""},
    ]
    bars = bars_of(record(attempts=attempts, transfer=None))
    assert [item.note for item in bars if item.role == "router"] == ["p0 and d0: WORKER_LOST", "d1"]
    assert {item.process for item in bars if item.what in ("queue", "prefill", "decode")} == {"d1"}


def test_a_request_that_never_reached_a_worker_is_drawn_too() -> None:
    refused = record(phases={}, attempts=[], transfer=None, ttft_s=None, e2e_s=0.2, router="")
    out = io.StringIO()
    Console(file=out, width=120).print(draw_processes(refused))
    assert "Processes: 200.0 ms in all" in out.getvalue()
    assert "not traced" in out.getvalue()


def listed(request_id: str, ttft_s: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "outcome": "stop",
        "age_s": 3.0,
        "ttft_s": ttft_s,
        "e2e_s": None if ttft_s is None else ttft_s + 1,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "output_tokens": 5,
    } | changes


def test_requests_are_listed_also_those_that_still_wait() -> None:
    text = draw_list([listed("a", 0.25), listed("b", None, outcome="running")]).plain.splitlines()
    assert [line.split()[-1] for line in text] == ["x-request-id", "a", "b"]
    assert text[1].split()[:4] == ["250.0", "ms", "1250.0", "ms"]
    assert text[2].split()[:2] == ["-", "-"]
    assert "no request" in draw_list([]).plain


def test_the_slowest_come_first_and_a_waiting_one_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def recent(url: str) -> list[dict[str, Any]]:
        return [listed("quick", 0.1), listed("waits", None, age_s=9.0), listed("slow", 5.0)]

    monkeypatch.setattr("pdserve.trace._recent", recent)
    assert list_recent("http://x", slowest=True) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["waits", "slow", "quick"]
    assert list_recent("http://x", slowest=False) == 0
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == ["quick", "waits", "slow"]
