"""What is checked before a cluster starts."""

from __future__ import annotations

import dataclasses
import os
import socket
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from pdserve.cache import forget_cluster, note_cluster, running_clusters
from pdserve.redis_server import redis_argv
from pdserve.up import preflight
from pdserve.up.errors import UpError
from pdserve.up.plan import Directories, free_ports, plan_cluster, reachable_host, redis_url_of, served_model_name
from pdserve.up.settings import UpSettings


def test_a_port_in_use_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UpError, match=rf"port {port} is in use: .*--port"):
            preflight.check_port("127.0.0.1", port)
    preflight.check_port("127.0.0.1", port)


def test_a_foreign_address_is_one_line() -> None:
    with pytest.raises(UpError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        preflight.check_port("192.0.2.1", 8000)


def engine_default(name: str) -> Any:
    return next(field.default for field in dataclasses.fields(EngineConfig) if field.name == name)


def test_memory_counts_every_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 1000)
    one = preflight.needed_bytes(UpSettings(aggregated=True), tmp_path)
    two = preflight.needed_bytes(UpSettings(), tmp_path)
    four = preflight.needed_bytes(UpSettings(prefill=2, decode=2), tmp_path)
    prefill_bytes = two - one
    decode_bytes = four - two - prefill_bytes
    assert prefill_bytes > 1 << 30
    assert decode_bytes - prefill_bytes == engine_default("host_kv_bytes")
    in_float32 = preflight.needed_bytes(UpSettings(aggregated=True, dtype="float32"), tmp_path)
    assert in_float32 - one == 2000
    monkeypatch.setattr(preflight, "available_bytes", lambda: two - 1)
    with pytest.raises(UpError, match=r"too little memory: 2 engines .*--kv-cache-bytes"):
        preflight.check_memory(UpSettings(), tmp_path)
    monkeypatch.setattr(preflight, "available_bytes", lambda: two)
    preflight.check_memory(UpSettings(), tmp_path)


def test_the_log_directories_of_old_runs_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    dead = subprocess.Popen(["true"])
    dead.wait(timeout=10)
    for i in range(14):
        owner = os.getpid() if i == 2 else dead.pid
        (tmp_path / "runs" / f"2020010{i:02}-000000-{owner}" / "private").mkdir(parents=True)
    dirs = preflight.make_directories()
    kept = {path.name for path in (tmp_path / "runs").iterdir()}
    assert len(kept) == 11
    assert f"202001002-000000-{os.getpid()}" in kept, "that one is still running"
    assert dirs.logs.name in kept
    assert stat.S_IMODE(dirs.runtime.stat().st_mode) == 0o700


def test_the_path_of_a_socket_is_short_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / ("long" * 30)))
    dirs = preflight.make_directories()
    dirs.runtime.rmdir()
    assert len(str(dirs.runtime / "redis.sock").encode()) < 108


def test_an_unwritable_cache_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(UpError, match="PDSERVE_CACHE"):
        preflight.make_directories()


def test_free_ports_differ() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20


def argv_by_name(
    settings: UpSettings, tmp_path: Path, binary: Path | None = Path("/bin/redis")
) -> dict[str, list[str]]:
    specs = plan_cluster(settings, tmp_path, binary, Directories(tmp_path, tmp_path))
    return {spec.name: spec.argv for spec in specs}


def value_of(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_a_cluster_knows_its_own_addresses(tmp_path: Path) -> None:
    argv = argv_by_name(UpSettings(prefill=2, decode=2, port=8123, num_threads=1), tmp_path)
    assert list(argv) == ["redis", "prefill-0", "prefill-1", "decode-0", "decode-1", "router", "gateway"]
    assert value_of(argv["gateway"], "--router") == f"127.0.0.1:{value_of(argv['router'], '--port')}"
    assert value_of(argv["gateway"], "--port") == "8123"
    services = [argv[name] for name in argv if name not in ("redis", "gateway")]
    ports = [value_of(each, flag) for each in services for flag in ("--port", "--metrics-port")]
    assert len(set(ports)) == 10
    assert {value_of(each, "--redis") for each in services} == {f"unix://{tmp_path}/redis.sock"}
    assert value_of(argv["decode-1"], "--worker-id") == "decode-1"
    assert value_of(argv["decode-1"], "--role") == "decode"
    assert value_of(argv["prefill-0"], "--num-threads") == "1"
    assert "--policy" not in argv["router"]


def test_aggregated_with_a_redis_of_the_users(tmp_path: Path) -> None:
    settings = UpSettings(aggregated=True, redis="redis://somewhere:6379", policy="least_loaded")
    argv = argv_by_name(settings, tmp_path, binary=None)
    assert list(argv) == ["aggregated-0", "router", "gateway"]
    assert value_of(argv["aggregated-0"], "--role") == "aggregated"
    assert value_of(argv["router"], "--redis") == "redis://somewhere:6379"
    assert value_of(argv["router"], "--policy") == "least_loaded"


def test_the_name_in_the_api(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = tmp_path / "my-model"
    model.mkdir()
    monkeypatch.chdir(model)
    assert served_model_name(UpSettings()) == "smollm2-135m-instruct"
    assert served_model_name(UpSettings(model="SmolLM2-135M-Instruct")) == "smollm2-135m-instruct"
    assert [served_model_name(UpSettings(model=name)) for name in (str(model), f"{model}/", ".")] == ["my-model"] * 3
    assert served_model_name(UpSettings(model="org/name")) == "org/name"
    assert served_model_name(UpSettings(served_model_name="x", model="org/name")) == "x"


def test_a_server_on_every_address_is_called_at_one() -> None:
    assert [reachable_host(host) for host in ("0.0.0.0", "127.0.0.1", "10.0.0.7")] == [
        "127.0.0.1",
        "127.0.0.1",
        "10.0.0.7",
    ]


def test_our_redis_keeps_nothing_and_listens_on_no_port(tmp_path: Path) -> None:
    argv = redis_argv(Path("/bin/redis"), tmp_path / "redis.sock")
    assert value_of(argv, "--port") == "0"
    assert value_of(argv, "--save") == ""
    assert value_of(argv, "--appendonly") == "no"
    assert int(value_of(argv, "--maxmemory")) > 0


def test_a_running_cluster_is_found_by_its_redis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDSERVE_CACHE", str(tmp_path))
    assert running_clusters() == []
    dirs = preflight.make_directories()
    note_cluster(dirs.logs, redis_url_of(UpSettings(redis="redis://somewhere:6379"), dirs))
    assert running_clusters() == ["redis://somewhere:6379"]
    (noted,) = dirs.logs.glob("redis.url")
    assert stat.S_IMODE(noted.stat().st_mode) == 0o600, "it may hold a password"
    dead = subprocess.Popen(["true"])
    dead.wait(timeout=10)
    (gone := tmp_path / "runs" / f"20200101-000000-{dead.pid}").mkdir()
    note_cluster(gone, "redis://elsewhere:6379")
    assert running_clusters() == ["redis://somewhere:6379"]
    forget_cluster(dirs.logs)
    assert running_clusters() == []
