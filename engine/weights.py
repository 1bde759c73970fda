"""Where a model's files are and how its tensors are read; not what they mean.

Owns finding the directory (or fetching it from the hub), the safetensors files (one or sharded) and the fingerprint.
A model is built by taking tensors by name from a ``WeightReader``: a name that is not there is an error, and so is one
that nobody took, so a checkpoint and a model that do not fit each other never serve.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
import xxhash
from huggingface_hub import snapshot_download
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn
from safetensors import SafetensorError, safe_open

from engine.model_config import ModelConfig
from engine.upload import Uploader

_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model"]
# Derived from the config, yet stored by old checkpoints.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")

_WHOLE_FILE_BYTES = 4 << 30
_SAMPLE_BYTES = 64 << 10
_SAMPLE_STRIDE_BYTES = 16 << 20


class WeightsError(ValueError):
    """The checkpoint and the model do not fit each other, or there is no checkpoint."""


def resolve_model(model: str) -> Path:
    """The directory of ``model``: itself if it is one, else fetched from the hub (or found in its cache)."""
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model):
        raise WeightsError(f"model {model!r} is neither a directory nor a hub name (org/name)")
    return Path(snapshot_download(model, allow_patterns=_HUB_FILES))


class Weights(Protocol):
    """Where a model's tensors come from. A context: leaving it says that all that is needed was taken."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor of that name, in the engine's dtype and on its device. The caller owns it."""
        ...

    def discard(self, name: str) -> None:
        """The model does not need this one."""
        ...


class WeightReader:
    """Takes tensors by name from the safetensors files of a directory, once each, with a progress bar on a terminal.

    Files are mapped: a tensor's bytes are read when it is taken, on a GPU straight into what is copied to the device.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._uploader = Uploader(device) if device.type == "cuda" else None
        paths = weight_files(directory)
        files = [_open(path) for path in paths]
        self._where = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        self._left = {name for name in self._where if not _IGNORED.search(name)}
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("loading weights"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._progress.add_task("", total=sum(path.stat().st_size for path in paths))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()
        if error is None and self._left:
            raise WeightsError(
                f"{len(self._left)} unexpected weights, such as {_some(self._left)}: "
                "the checkpoint holds more than the architecture in its config.json"
            )

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, in the engine's dtype and on its device. The caller owns it.

        Raises:
            WeightsError: it is missing or has another shape.
        """
        if name not in self._where:
            raise WeightsError(f"weight {name!r} is missing; the checkpoint has {_some(self._where)}")
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise WeightsError(f"weight {name!r} has shape {tuple(tensor.shape)}, but config.json says {shape}")
        self._left.discard(name)
        self._progress.advance(self._task, tensor.nbytes)
        if self._uploader is not None:
            tensor = self._uploader.upload(tensor)
        return tensor.to(device=self._device, dtype=self._dtype)

    def discard(self, name: str) -> None:
        """The model does not need this one (a tied output head, stored all the same)."""
        self._left.discard(name)


def _open(path: Path) -> Any:
    try:
        path.open("rb").close()  # safe_open says of a file that it may not read that it is not there
        return safe_open(path, framework="pt")
    except PermissionError as error:
        raise WeightsError(f"{path} cannot be read ({error.strerror}): let this process's user read it") from error
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} cannot be read ({error}): it is damaged or not whole, fetch it again") from error


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, in a fixed order."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [directory / name for name in names]
        absent = [path.name for path in files if not path.is_file()]
        if absent:
            raise WeightsError(f"{index} names {_some(absent)}, which is not there: fetch the model again")
        return files
    single = directory / "model.safetensors"
    if not single.is_file():
        raise WeightsError(
            f"{directory} has no model.safetensors (nor an index of shards): other formats are not read; "
            "convert with transformers' save_pretrained"
        )
    return [single]


def model_fingerprint(directory: Path, config: ModelConfig) -> str:
    """What must be equal for two engines to share KV: the configuration, and the tensors' names, shapes and bytes.

    Files up to 4 GiB in all are hashed whole (about 10 GB/s from the page cache). Of larger ones the header is, and
    64 KiB in every 16 MiB: enough to tell another training run or another conversion (they differ nearly everywhere),
    not to detect a few flipped bytes.
    """
    digest = xxhash.xxh3_128(repr(config).encode())
    files = weight_files(directory)
    whole = sum(path.stat().st_size for path in files) <= _WHOLE_FILE_BYTES
    for path in files:
        size = path.stat().st_size
        digest.update(f"{size}".encode())
        with path.open("rb") as file:
            if whole:
                while chunk := file.read(_SAMPLE_STRIDE_BYTES):
                    digest.update(chunk)
                continue
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            for offset in range(8 + header_bytes, size, _SAMPLE_STRIDE_BYTES):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
