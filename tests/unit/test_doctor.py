"""``pdserve doctor``: what is missing is said, with its remedy, and shows in the exit status."""

from __future__ import annotations

import importlib.util
import shutil
import socket
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from pdserve import doctor
from pdserve.up.plan import free_ports


def findings(redis_url: str | None = None, port: int = 0) -> dict[str, doctor.Finding]:
    return {finding.what: finding for finding in doctor.examine(redis_url, port or free_ports(1)[0])}


def test_this_machine_has_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert {name for name, finding in findings().items() if finding.ok is False} == set()
    assert doctor.doctor(None, free_ports(1)[0]) == 0
    output = capsys.readouterr().out
    for word in ("torch", "GPU", "transport tcp", "transport shm", "transport ucx", "Redis", "memory", "cache"):
        assert word in output


def test_a_missing_package_fails_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without_msgspec(name: str) -> ModuleSpec | None:
        return None if name == "msgspec" else find(name)

    monkeypatch.setattr(importlib.util, "find_spec", without_msgspec)
    assert findings()["packages"] == doctor.Finding("packages", False, "missing: msgspec", "pip install -e '.[serve]'")
    assert doctor.doctor(None, free_ports(1)[0]) == 1


def test_an_unreachable_redis_fails() -> None:
    (port,) = free_ports(1)
    finding = findings(f"redis://127.0.0.1:{port}")["Redis"]
    assert finding.ok is False
    assert "start it" in finding.remedy


def test_what_is_optional_only_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = findings(port=server.getsockname()[1])
    assert found["GPU"].ok is None
    assert found["C compiler"].ok is None
    assert found["HTTP port"].ok is None
    assert "--port" in found["HTTP port"].remedy
    assert "not a port" in findings(port=99999)["HTTP port"].remedy


def test_ucx_from_pip_is_said_to_have_no_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("json") if name == "ucxx" else find(name))
    monkeypatch.delenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", raising=False)
    assert "no RDMA" in findings()["transport ucx"].detail
    monkeypatch.setenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", "true")
    assert "system" in findings()["transport ucx"].detail


def test_a_cache_that_cannot_be_written_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", "/proc/nowhere")
    monkeypatch.setattr("os.access", lambda path, mode: not str(path).startswith("/proc"))
    assert findings()["cache"].ok is False


@pytest.mark.parametrize(("free_bytes", "ok"), [(0, False), (1 << 40, True)])
def test_a_full_disk_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free_bytes: int, ok: bool) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=free_bytes))
    assert findings()["cache"].ok is ok
    assert ("make room" in findings()["cache"].remedy) is not ok
