"""A model directory that this process's user may not read: whoever needs it says which file, and what to do."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.weights import WeightReader, WeightsError
from pdserve.model_store import ModelUnavailableError, resolve_model

NOBODY = 65534


@pytest.fixture
def directory() -> Iterator[Path]:
    """Not in tmp_path, which nobody else may enter. To root everything is readable, so root is nobody meanwhile."""
    path = Path(tempfile.mkdtemp(prefix="pdserve-test-"))
    (path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(4)}, path / "model.safetensors")
    path.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        yield path
    finally:
        os.seteuid(user)
        path.chmod(0o755)
        shutil.rmtree(path)


def deny(path: Path) -> None:
    user = os.geteuid()
    os.seteuid(os.getuid())
    path.chmod(0)
    os.seteuid(user)


def test_the_directory(directory: Path) -> None:
    assert resolve_model(str(directory)) == directory.resolve()
    deny(directory)
    with pytest.raises(
        ModelUnavailableError, match=r"config\.json cannot be read \(Permission denied\): let .* read it"
    ):
        resolve_model(str(directory))


def test_its_config(directory: Path) -> None:
    deny(directory / "config.json")
    with pytest.raises(
        ModelUnavailableError, match=r"config\.json cannot be read \(Permission denied\): let .* read it"
    ):
        resolve_model(str(directory))


def test_its_weights(directory: Path) -> None:
    deny(directory / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors cannot be read \(Permission denied\): let .* read it"):
        WeightReader(directory, torch.float32, torch.device("cpu"))
