"""The measurement of streaming costs runs, and what it offers arrives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("part", ["router", "gateway"])
def test_it_measures(part: str) -> None:
    flags = ["--streams", "16", "--rate", "320", "--seconds", "1"]
    command = [sys.executable, "-m", "bench.session_cost", part, *flags]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
    result = json.loads(run.stdout)
    assert (result["part"], result["streams"]) == (part, 16)
    assert result["tokens_per_s"] > 0
    assert result["cpu_us_per_token"] > 0
