"""A whole cluster under mutual TLS: it serves, `pdserve drain` gets in, and who has no certificate does not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import trustme

from tests.e2e.client import complete
from tests.e2e.cluster import running
from tests.services.tls_files import write_tls_dir

WORKER_FLAGS = ("--dtype", "float32", "--num-threads", "1")


def drain(worker: str, redis_url: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pdserve.cli", "drain", worker, "--redis", redis_url]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_cluster_under_tls_serves_and_drains(tmp_path, model_dir, oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    without = dict(os.environ)
    monkeypatch.setenv("PDSERVE_TLS_DIR", write_tls_dir(tmp_path / "tls", trustme.CA()))
    with running(tmp_path, str(model_dir), worker_flags=WORKER_FLAGS) as cluster:
        prompt = oracle.chat_ids("What is a lighthouse?")
        want = oracle.generate([prompt], 12)[0]
        oracle.assert_same(prompt, complete(cluster.url, prompt, max_tokens=12).token_ids, want, "under TLS")
        assert cluster["decode-0"].metrics()["pdserve_kv_transfer_seconds_count"] == 1
        refused = drain("prefill-0", cluster.redis_url, without)
        assert refused.returncode == 1
        assert "does not answer" in refused.stderr
        cluster.assert_no_leak()
        drained = drain("prefill-0", cluster.redis_url, dict(os.environ))
        assert drained.returncode == 0, drained.stderr
        assert cluster["prefill-0"].process.wait(timeout=30) == 0
