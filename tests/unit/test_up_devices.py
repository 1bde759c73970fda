"""Which GPU each worker gets, and which part of its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.up import plan
from pdserve.up.devices import assign_devices, count_gpus, memory_parts
from pdserve.up.errors import UpError
from pdserve.up.plan import Directories, plan_cluster
from pdserve.up.settings import UpSettings


@pytest.mark.parametrize(
    ("asked", "workers", "gpus", "devices", "parts"),
    [
        ("auto", 2, 0, ["cpu", "cpu"], [0.45, 0.45]),
        ("cpu", 1, 4, ["cpu"], [0.9]),
        ("auto", 2, 1, ["cuda:0", "cuda:0"], [0.45, 0.45]),
        ("cuda", 2, 2, ["cuda:0", "cuda:1"], [0.9, 0.9]),
        ("auto", 3, 2, ["cuda:0", "cuda:1", "cuda:0"], [0.45, 0.9, 0.45]),
        ("cuda:1", 3, 2, ["cuda:1"] * 3, [0.3, 0.3, 0.3]),
    ],
)
def test_workers_are_dealt_out_over_the_gpus(
    asked: str, workers: int, gpus: int, devices: list[str], parts: list[float]
) -> None:
    assert assign_devices(asked, workers, gpus) == devices
    assert memory_parts(devices, 0.9) == parts


@pytest.mark.parametrize(("asked", "gpus", "named"), [("cuda", 0, "--device cpu"), ("cuda:2", 2, "last GPU .* cuda:1")])
def test_a_gpu_that_is_not_there_is_one_line(asked: str, gpus: int, named: str) -> None:
    with pytest.raises(UpError, match=named):
        assign_devices(asked, 1, gpus)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "1"])
def test_unknown_devices(device: str) -> None:
    with pytest.raises(UpError, match="use auto, cpu, cuda or cuda:N"):
        UpSettings(device=device)


def test_hidden_gpus_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0


def test_the_workers_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plan, "count_gpus", lambda: 1)
    specs = plan_cluster(UpSettings(), tmp_path, tmp_path / "server", Directories(tmp_path, tmp_path))
    workers = [spec.argv for spec in specs if spec.name in ("prefill-0", "decode-0")]
    assert len(workers) == 2
    for argv in workers:
        assert argv[argv.index("--device") + 1] == "cuda:0"
        assert argv[argv.index("--gpu-memory-utilization") + 1] == "0.45"
        assert "--kv-cache-bytes" not in argv


def test_the_itl_budget_is_for_those_who_decode(tmp_path: Path) -> None:
    for settings in (UpSettings(itl_budget_ms=12.5), UpSettings(itl_budget_ms=12.5, aggregated=True)):
        specs = plan_cluster(settings, tmp_path, tmp_path / "server", Directories(tmp_path, tmp_path))
        told = {
            spec.name: spec.argv[spec.argv.index("--itl-budget-ms") + 1]
            for spec in specs
            if "--itl-budget-ms" in spec.argv
        }
        assert told == {"aggregated-0" if settings.aggregated else "decode-0": "12.5"}
