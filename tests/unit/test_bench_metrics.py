"""Figures of ``bench serve`` against numpy, from answers whose moments the test decides."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.serve.endpoint import Answer
from bench.serve.metrics import Limits, summarize
from bench.serve.plots import draw_rates, draw_run
from bench.serve.records import Outcome, Record, Samples
from bench.serve.report import as_json, remarks, table
from bench.serve.runner import Run


def event(data: Any) -> bytes:
    return b"data: " + (data if isinstance(data, bytes) else json.dumps(data).encode()) + b"\n\n"


def piece(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
}


def filled(answer: Answer, sent_s: float = 0.0) -> Record:
    record = Record(0, sent_s, sent_s)
    answer.fill(record)
    return record


def test_only_text_counts() -> None:
    """The role chunk is no first token, empty chunks are no gaps, and the end is the choice's last chunk."""
    answer = Answer()
    moments = [(1.0, ROLE), (2.0, piece("a")), (2.5, piece("")), (3.0, piece("b")), (3.25, piece("c"))]
    moments += [(3.5, piece("", "stop")), (9.0, USAGE)]
    for now_s, data in moments:
        answer.feed(event(data), now_s)
    answer.feed(event(b"[DONE]"), 9.5)
    record = filled(answer, sent_s=0.5)
    assert answer.error == ""
    assert record.ttft_s == 1.5
    assert answer.gaps_s == [1.0, 0.25]
    assert record.e2e_s == 3.0
    assert record.num_chunks == 3
    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (10, 5, 4)
    assert record.tpot_s == pytest.approx((3.0 - 1.5) / 4)
    assert record.is_counted


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_however_the_bytes_are_cut(newline: bytes, size: int) -> None:
    whole = b": a comment\n\n" + b"".join(
        map(event, [ROLE, piece("ä"), piece("b"), piece("", "stop"), USAGE, b"[DONE]"])
    )
    whole = whole.replace(b"\n", newline)
    answer = Answer()
    for start in range(0, len(whole), size):
        answer.feed(whole[start : start + size], float(start))
    assert answer.error == ""
    assert filled(answer).num_chunks == 2
    assert filled(answer).output_tokens == 5


def test_completions_reasoning_and_servers_without_usage() -> None:
    answer = Answer()
    answer.feed(event({"choices": [{"index": 0, "text": "x", "finish_reason": None}]}), 1.0)
    answer.feed(event({"choices": [{"index": 0, "delta": {"reasoning_content": "y"}}]}), 2.0)
    answer.feed(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}), 3.0)
    record = filled(answer)
    assert answer.error == ""
    assert (record.num_chunks, record.output_tokens, record.is_counted) == (2, 2, False)


def test_broken_answers() -> None:
    cut = Answer()
    cut.feed(event(piece("a")), 1.0)
    assert "without a finish" in cut.error
    failed = Answer()
    failed.feed(event(piece("a")) + event({"error": {"message": "worker lost"}}) + event(b"[DONE]"), 1.0)
    assert failed.error == "in the stream: worker lost"


def make_run(seed: int = 0, count: int = 300) -> Run:
    rng = np.random.default_rng(seed)
    run = Run(duration_s=20.0, peak_open=9, client_cpu_s=1.0)
    for index in range(count):
        sent_s, ttft_s = rng.uniform(0, 10), rng.gamma(2, 0.1)
        gaps = rng.gamma(2, 0.02, int(rng.integers(0, 40)))
        record = Record(
            index,
            sent_s - 0.001,
            sent_s,
            first_text_s=sent_s + ttft_s,
            last_s=sent_s + ttft_s + gaps.sum(),
            outcome=Outcome.OK,
            input_tokens=int(rng.integers(1, 500)),
            output_tokens=len(gaps) + 1,
            cached_tokens=1,
            itl_p99_s=float(np.percentile(gaps, 99)) if len(gaps) else 0.0,
        )
        run.itls.extend(gaps)
        run.records.append(record)
    run.records[5].outcome, run.records[5].error = Outcome.REFUSED, "HTTP 429: busy"
    run.records[6].outcome, run.records[6].error = Outcome.FAILED, "reset"
    return run


def test_summary_against_numpy() -> None:
    run = make_run()
    limits = Limits.parse("ttft:250,tpot:45 itl_p99:110")
    summary = summarize(run, limits)
    good = [record for record in run.records if record.index not in (5, 6)]
    ttft = np.array([record.first_text_s - record.sent_s for record in good])  # type: ignore[operator]
    tpot = np.array([(r.last_s - r.first_text_s) / (r.output_tokens - 1) for r in good if r.output_tokens > 1])  # type: ignore[operator]
    assert (summary.completed, summary.refused, summary.failed) == (298, 1, 1)
    assert summary.ttft.mean == pytest.approx(ttft.mean() * 1e3)
    assert summary.ttft.median == pytest.approx(np.median(ttft) * 1e3)
    assert summary.ttft.p99 == pytest.approx(np.percentile(ttft, 99) * 1e3)
    assert summary.tpot.mean == pytest.approx(tpot.mean() * 1e3)
    assert summary.tpot.p99 == pytest.approx(np.percentile(tpot, 99) * 1e3)
    assert summary.itl.mean == pytest.approx(np.mean(run.itls.values) * 1e3)
    assert summary.send_lag.mean == pytest.approx(1.0)
    outputs = sum(record.output_tokens for record in good)
    inputs = sum(record.input_tokens for record in good)
    assert (summary.total_output_tokens, summary.total_input_tokens) == (outputs, inputs)
    assert summary.output_throughput == pytest.approx(outputs / 20)
    assert summary.total_token_throughput == pytest.approx((outputs + inputs) / 20)
    met = sum(record.ttft_s <= 0.25 and (record.tpot_s or 0) <= 0.045 and record.itl_p99_s <= 0.11 for record in good)
    assert 20 < met < 280
    assert summary.request_goodput == pytest.approx(met / 20)
    assert summarize(run, Limits()).request_goodput is None


def test_a_run_in_which_nothing_was_answered() -> None:
    run = Run(records=[Record(0, 0.0, error="reset")], duration_s=1.0)
    summary = summarize(run, Limits.parse("ttft:1"))
    assert (summary.completed, summary.failed, summary.request_goodput) == (0, 1, 0.0)
    assert summary.ttft.p99 == summary.itl.mean == 0.0
    assert "Successful requests:                     0" in table(summary, request_rate=None, max_concurrency=None)
    assert remarks(summary, run.records, None) == ["1 failed: reset"]


def test_wrong_goodput_limits() -> None:
    for wrong in ("ttft", "ttft:fast", "speed:3", "ttft:nan", "tpot:-1", "e2el:inf"):
        with pytest.raises(ValueError, match="goodput limit"):
            Limits.parse(wrong)
    assert not Limits.parse("").is_set


def test_samples_are_exact_then_uniform() -> None:
    exact = Samples(limit=1000)
    exact.extend(range(1000))
    assert list(exact.values) == list(range(1000))
    bounded = Samples(limit=2000, seed=1)
    bounded.extend(i / 100_000 for i in range(100_000))
    assert len(bounded.values) == 2000
    assert bounded.num_seen == 100_000
    for share in (10, 50, 90):
        assert np.percentile(bounded.values, share) == pytest.approx(share / 100, abs=0.04)


def test_the_table_has_the_layout_that_users_know() -> None:
    run = make_run()
    lines = table(summarize(run, Limits.parse("ttft:250")), request_rate=4.0, max_concurrency=8).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[-1] == "=" * 50
    assert "---------------Time to First Token----------------" in lines
    assert "-----Time per Output Token (excl. 1st token)------" in lines
    assert "---------------Inter-token Latency----------------" in lines
    labels = [line[:40].rstrip() for line in lines if ":" in line]
    wanted = ["Successful requests:", "Benchmark duration (s):", "Total input tokens:", "Total generated tokens:"]
    wanted += ["Request throughput (req/s):", "Request goodput (req/s):", "Output token throughput (tok/s):"]
    wanted += ["Total Token throughput (tok/s):"]
    wanted += [f"{kind} {name} (ms):" for name in ("TTFT", "TPOT", "ITL") for kind in ("Mean", "Median", "P99")]
    assert [label for label in labels if label in wanted] == wanted
    assert "Maximum request concurrency:             8         " in lines


def test_json_and_plots(tmp_path: Path) -> None:
    run = make_run()
    summary = summarize(run, Limits.parse("ttft:250"))
    data = as_json(summary, {"seed": 3}, run.records, detailed=True)
    assert data["seed"] == 3
    assert data["p99_ttft_ms"] == summary.ttft.p99
    assert data["duration"] == 20.0
    assert data["errors"] == {"HTTP 429: busy": 1, "reset": 1}
    assert len(data["requests"]) == 300
    assert data["requests"][0] | asdict(run.records[0]) == data["requests"][0]
    json.dumps(data)
    draw_run(run, "a run", tmp_path / "run.png")
    draw_run(Run(), "nothing", tmp_path / "empty.png")
    draw_rates([1.0, 2.0], [summary, summary], "rates", tmp_path / "rates.png")
    for name in ("run", "empty", "rates"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
