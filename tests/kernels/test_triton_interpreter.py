"""The portable Triton kernels on the CPU, interpreted, tiny: what CI can run of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

triton = pytest.importorskip("triton")

# Compiled kernels do not pass the interpreter. That of Triton 3.6 (of torch 2.11) takes int() of arrays of one element,
# which numpy 2.4 refuses, and writes -1 as uint32.
pytestmark = pytest.mark.skipif(
    Version(triton.__version__) < Version("3.7"), reason="the interpreter of Triton 3.6 fails with numpy 2"
)

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("decode", "prefill", "cascade", "between", "skinny", "fused", "sampling", "kv_pack")


@pytest.mark.parametrize("family", FAMILIES)
def test_interpreted_kernels_agree_with_float64(family: str) -> None:
    # The interpreter has to be chosen before triton is imported, hence a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.triton_checks", "cpu", family]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_interpreted_kv_copies_agree_with_copies_block_by_block() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.kv_copies_checks"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_tiny_model_of_interpreted_products_agrees_with_float64() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.model_checks"]
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
