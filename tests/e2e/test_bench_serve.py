"""A short ``pdserve bench serve`` against a real cluster: figures agree among each other and with the cluster's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.cluster import running

ROOT = Path(__file__).resolve().parents[2]


def test_counts_add_up(tmp_path: Path, model_dir: Path) -> None:
    with running(tmp_path, str(model_dir)) as cluster:
        flags = ["--base-url", cluster.url, "--dataset-name", "prefix_repetition", "--num-prompts", "12"]
        flags += ["--prefix-repetition-num-prefixes", "2", "--prefix-repetition-prefix-len", "64"]
        flags += ["--prefix-repetition-suffix-len", "8", "--prefix-repetition-output-len", "6"]
        flags += ["--request-rate", "6", "--max-concurrency", "4", "--num-warmups", "0", "--goodput", "ttft:600000"]
        flags += ["--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "result.json"]
        command = [sys.executable, "-m", "pdserve.cli", "bench", "serve", *flags]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert run.returncode == 0, run.stderr
        assert "Serving Benchmark Result" in run.stdout
        metrics = cluster["gateway"].metrics()
        cluster.assert_no_leak()
    data = json.loads((tmp_path / "result.json").read_text())
    requests = data["requests"]
    assert (data["completed"], data["refused"], data["failed"]) == (12, 0, 0)
    assert data["total_input_tokens"] == sum(request["input_tokens"] for request in requests) == 12 * 72
    assert data["total_output_tokens"] == sum(request["output_tokens"] for request in requests) == 12 * 6
    assert metrics["vllm:prompt_tokens_total"] == data["total_input_tokens"]
    assert metrics["vllm:generation_tokens_total"] == data["total_output_tokens"]
    assert metrics["pdserve_cached_tokens_total"] == data["total_cached_tokens"] > 0, "prefixes were shared"
    assert data["output_throughput"] == pytest.approx(data["total_output_tokens"] / data["duration"])
    assert data["request_throughput"] == data["request_goodput"] == pytest.approx(12 / data["duration"])
    for request in requests:
        assert 0 < request["ttft_s"] <= request["e2e_s"]
        assert request["tpot_s"] == pytest.approx((request["e2e_s"] - request["ttft_s"]) / 5)
        assert request["num_chunks"] <= 6
    mean_ttft_ms = 1e3 * sum(request["ttft_s"] for request in requests) / 12
    assert data["mean_ttft_ms"] == pytest.approx(mean_ttft_ms)
