"""Choosing kernels: the native ones where they can be built, else torch's, and always a reason."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine.kernels import KernelsUnavailableError, fastest_kernels, load_kernels, native_build

CPU = torch.device("cpu")


def test_native_kernels_are_taken_where_there_is_a_compiler() -> None:
    kernels, reason = fastest_kernels(CPU)
    assert (kernels.name, reason) == ("native", "")


def test_without_a_compiler_torch_serves_and_says_what_would_help(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    kernels, reason = fastest_kernels(CPU)
    assert kernels.name == "torch"
    assert "install gcc" in reason


def test_a_failing_compiler_is_quoted(monkeypatch, tmp_path) -> None:
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && echo 1.0 && exit\necho this is no good >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KernelsUnavailableError, match="this is no good"):
        load_kernels("native")
    assert [path.name for path in (tmp_path / "cache" / "kernels").iterdir()] == ["compiling.lock"]


def test_compiled_once_then_found(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    compiled: list[Path] = []

    def fake_compile(compiler: str, library: Path) -> None:
        compiled.append(library)
        library.write_bytes(b"")

    monkeypatch.setattr(native_build, "_compile", fake_compile)
    assert native_build._compiled() == native_build._compiled() == compiled[0]
    assert len(compiled) == 1
    with pytest.raises(KernelsUnavailableError, match="remove it to compile it anew"):
        load_kernels("native")


def test_an_unwritable_cache_is_replaced_by_a_private_one(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(native_build.tempfile, "gettempdir", lambda: str(tmp_path))
    directory = native_build._cache_directory()
    assert directory.parent == tmp_path
    assert directory.stat().st_mode & 0o777 == 0o700


def test_an_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'abacus' is not known: use native, torch"):
        load_kernels("abacus")


@pytest.mark.parametrize(("capability", "is_own"), [((8, 9), True), ((9, 0), True), ((10, 0), True), ((12, 0), False)])
def test_products_whose_tiles_do_not_fit_shared_memory_are_left_to_the_library(monkeypatch, capability, is_own) -> None:
    """What the tilings take, compiled for each: up to 84, 192, 192 and 160 KB; CUDA gives 99, 227, 227 and 99."""
    triton_gpu = pytest.importorskip("engine.kernels.triton_gpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for outputs in (4096, 28672):
        weight = SimpleNamespace(shape=(outputs, 4096), dtype=torch.bfloat16, device=torch.device("cuda"))
        for narrow in (False, True):
            assert (triton_gpu._tiling(weight, narrow=narrow) is not None) == is_own
