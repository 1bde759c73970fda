"""Every kernel that an engine launches at its start becomes machine code, on each architecture, without a GPU.

The oracle is ptxas, and the shared memory that a block may have according to the CUDA programming guide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.kernels.offline_gpu import SHARED_BYTES

ROOT = Path(__file__).resolve().parents[2]
HELD_IN_REGISTERS = {"_skinny_kernel", "_skinny_qkv_kernel", "swiglu_kernel"}
"""Their accumulators are as large as fit: a little more, and each product waits for memory."""


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_a_start_compiles(arch: int, tmp_path: Path) -> None:
    # Triton and our kernels remember what device they are on, hence a process of its own.
    output = tmp_path / "kernels.json"
    command = [sys.executable, "-m", "tests.kernels.offline_start", "--arch", str(arch), "--output", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    kernels = json.loads(output.read_text())
    names = {kernel["name"] for kernel in kernels}
    assert {"_decode_kernel", "_argmax_kernel", "_threshold_kernel", "_rope_kv_write_kernel"} <= names
    assert ("hopper_kernel" in names) == (arch == 90)
    too_large = [kernel for kernel in kernels if kernel["shared_bytes"] > SHARED_BYTES[arch]]
    assert not too_large
    if arch == 90:
        assert {k["stack_bytes"] for k in kernels if k["name"] in HELD_IN_REGISTERS} == {0}
