"""Finding and reading safetensors files: what does not fit is an error that names it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from engine.model_config import parse_model_config
from engine.weights import WeightReader, WeightsError, model_fingerprint, resolve_model, weight_files
from tests.unit.test_model_config import LLAMA

CPU = torch.device("cpu")


def reader(directory, dtype: torch.dtype = torch.float32) -> WeightReader:
    return WeightReader(directory, dtype, CPU)


def save_sharded(directory) -> None:
    save_file({"a": torch.ones(2, 3)}, directory / "one.safetensors")
    save_file({"b": torch.zeros(4)}, directory / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_tensors_are_taken_from_all_shards_in_the_engines_dtype(tmp_path) -> None:
    save_sharded(tmp_path)
    with reader(tmp_path, torch.bfloat16) as weights:
        assert torch.equal(weights.take("a", (2, 3)), torch.ones(2, 3, dtype=torch.bfloat16))
        weights.take("b", (4,))


def test_missing_wrong_and_unexpected_weights(tmp_path) -> None:
    save_file({"a": torch.ones(2, 3), "x.rotary_emb.inv_freq": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="'b' is missing; the checkpoint has a"), reader(tmp_path) as weights:
        weights.take("b", (1,))
    with (
        pytest.raises(WeightsError, match=r"shape \(2, 3\), but config.json says \(3, 2\)"),
        reader(tmp_path) as weights,
    ):
        weights.take("a", (3, 2))
    with pytest.raises(WeightsError, match="1 unexpected weights, such as a"), reader(tmp_path):
        pass
    with reader(tmp_path) as weights:
        weights.discard("a")


def test_no_checkpoint(tmp_path) -> None:
    with pytest.raises(WeightsError, match=r"no model\.safetensors"):
        weight_files(tmp_path)
    save_sharded(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"two\.safetensors, which is not there"):
        weight_files(tmp_path)


def test_where_a_model_is(tmp_path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(WeightsError, match="neither a directory nor a hub name"):
        resolve_model(str(tmp_path / "nowhere"))


def test_fingerprint_changes_with_weights_and_config_only(tmp_path) -> None:
    config = parse_model_config(LLAMA)
    weights = {"a": torch.arange(1000.0)}
    save_file(weights, tmp_path / "model.safetensors")
    first = model_fingerprint(tmp_path, config)
    (tmp_path / "README.md").write_text("unrelated")
    assert model_fingerprint(tmp_path, config) == first
    assert model_fingerprint(tmp_path, dataclasses.replace(config, rms_norm_eps=1e-6)) != first
    weights["a"][500] += 1
    save_file(weights, tmp_path / "model.safetensors")
    assert model_fingerprint(tmp_path, config) != first


def test_large_files_are_sampled(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("engine.weights._WHOLE_FILE_BYTES", 0)
    monkeypatch.setattr("engine.weights._SAMPLE_STRIDE_BYTES", 4096)
    monkeypatch.setattr("engine.weights._SAMPLE_BYTES", 64)
    config = parse_model_config(LLAMA)
    weights = {"a": torch.arange(10000.0)}
    save_file(weights, tmp_path / "model.safetensors")
    first = model_fingerprint(tmp_path, config)
    save_file({"b": weights["a"]}, tmp_path / "model.safetensors")
    assert model_fingerprint(tmp_path, config) != first  # the header is read whole
    save_file({"a": weights["a"] * 1.001}, tmp_path / "model.safetensors")
    assert model_fingerprint(tmp_path, config) != first


def test_a_terminal_shows_how_far_loading_is(tmp_path) -> None:
    save_sharded(tmp_path)
    code = (
        "import sys, torch; from pathlib import Path; from engine.weights import WeightReader\n"
        "with WeightReader(Path(sys.argv[1]), torch.float32, torch.device('cpu')) as weights:\n"
        "    weights.take('a', (2, 3)); weights.take('b', (4,))\n"
    )
    terminal, child_end = pty.openpty()
    with open(terminal, "rb", buffering=0) as shown:
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=child_end, stdout=subprocess.PIPE)
        os.close(child_end)
        output = b""
        with contextlib.suppress(OSError):  # how a pty says that the other end is closed
            while part := shown.read(4096):
                output += part
        child.communicate(timeout=60)
    assert child.returncode == 0
    assert b"loading weights" in output
    assert b"bytes" in output  # how many of how many


def test_a_damaged_file_is_named(tmp_path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read .*fetch it again"):
        reader(tmp_path)
