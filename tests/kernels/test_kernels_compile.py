"""Every kernel that an engine launches becomes machine code, on each architecture, without a GPU: ahead, at its start.

The oracles: ptxas and the shared memory that a block may have according to the CUDA programming guide; what is launched
when nothing is compiled ahead; compilation on one thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from triton import knobs

from tests.kernels.offline_gpu import SHARED_BYTES

ROOT = Path(__file__).resolve().parents[2]
HELD_IN_REGISTERS = {"_skinny_kernel", "_skinny_qkv_kernel", "swiglu_kernel"}
"""Their accumulators are as large as fit: a little more, and each product waits for memory."""


def run(module: str, *args: str, **environment: str) -> str:
    """A program of its own: Triton and our kernels remember what device they are on."""
    result = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}", *args],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


def start(directory: Path, *args: str, **environment: str) -> tuple[dict[str, Any], str]:
    output = directory / "kernels.json"
    said = run("offline_start", *args, "--output", str(output), **environment)
    found: dict[str, Any] = json.loads(output.read_text())
    return found, said


@pytest.mark.parametrize("arch", SHARED_BYTES)
def test_a_start_compiles_everything_ahead(arch: int, tmp_path: Path) -> None:
    found, _ = start(tmp_path, "--arch", str(arch), "--threads", "2")
    kernels = found["kernels"]
    names = {kernel["name"] for kernel in kernels}
    assert {"_decode_kernel", "_argmax_kernel", "_threshold_kernel", "_rope_kv_write_kernel"} <= names
    assert ("hopper_kernel" in names) == (arch == 90)
    too_large = [kernel for kernel in kernels if kernel["shared_bytes"] > SHARED_BYTES[arch]]
    assert not too_large
    if arch == 90:
        assert {k["stack_bytes"] for k in kernels if k["name"] in HELD_IN_REGISTERS} == {0}
        products = [k for k in kernels if k["wgmmas"]]
        assert {"swiglu_kernel", "hopper_kernel"} <= {k["name"] for k in products}
        assert all(2 * k["waits"] < k["wgmmas"] for k in products), products  # several in flight at a time
    assert found["when_launched"] == []


def test_threads_compile_what_one_thread_would(tmp_path: Path) -> None:
    alone, _ = start(tmp_path, "--small", "--threads", "0")
    ahead, _ = start(tmp_path, "--small", "--threads", "4")
    assert len(alone["when_launched"]) == len(alone["kernels"]) > 10
    by_threads = {(kernel["name"], kernel["sha256"]) for kernel in ahead["kernels"]}
    assert {(kernel["name"], kernel["sha256"]) for kernel in alone["kernels"]} <= by_threads


def test_requests_find_their_kernels_compiled() -> None:
    run("offline_requests", "--arch", "90")


def _bad_once(directory: Path, kernel: str, fault: str) -> str:
    """A ptxas that does ``fault`` the first time it is to assemble that kernel."""
    real = knobs.nvidia.ptxas.path
    ptxas = directory / "ptxas"
    ptxas.write_text(
        f"""#!/bin/sh
for file in "$@"; do
  if grep -q -e "entry {kernel}" -- "$file" 2>/dev/null && mkdir {directory}/was_bad 2>/dev/null; then {fault}; fi
done
exec {real} "$@"
"""
    )
    ptxas.chmod(0o755)
    return str(ptxas)


def test_what_fails_ahead_is_compiled_when_launched(tmp_path: Path) -> None:
    ptxas = _bad_once(tmp_path, "_plan_kernel", "exit 1")
    found, said = start(tmp_path, "--arch", "80", "--small", "--threads", "2", TRITON_PTXAS_PATH=ptxas)
    assert (tmp_path / "was_bad").exists()
    assert found["when_launched"] == ["_plan_kernel"]
    assert said.count("kernels_not_compiled_ahead") == 1


def test_a_start_does_not_wait_for_a_compiler_that_hangs(tmp_path: Path) -> None:
    ptxas = _bad_once(tmp_path, "_commit_kernel", "exec sleep 25")
    found, said = start(
        tmp_path, "--arch", "80", "--small", "--threads", "2", "--patience", "5", TRITON_PTXAS_PATH=ptxas
    )
    assert (tmp_path / "was_bad").exists()
    # Maybe others, too: what five seconds were not enough for.
    assert "_commit_kernel" in found["when_launched"]
    assert said.count("kernels_not_compiled_ahead") == 1
