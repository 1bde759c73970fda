"""The command line itself: what it says when it cannot do what it was asked."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from typer.testing import CliRunner

from pdserve.cli import app


@pytest.mark.parametrize(
    ("what", "missing", "words"),
    [
        ("serve", "aiohttp", "pip install -e '.[bench]'"),
        ("serve", "bench", "run this from the repository"),
        ("kernels", "triton", "CUDA GPU"),
        ("nothing", "", "there are serve, engines, kernels"),
    ],
)
def test_a_benchmark_that_cannot_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, what: str, missing: str, words: str
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == missing else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    result = CliRunner().invoke(app, ["bench", what])
    assert result.exit_code == 1
    assert words in result.output
    assert result.output.count("\n") == 1
