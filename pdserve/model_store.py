"""Where models lie: the cache directory, the default model in it, and what ``--model`` may mean.

Owns ``models/`` of the cache (``cache``) and its lock. What the default model's directory contains
is ``smollm2``'s. Called by ``pdserve up`` and by whoever needs a model directory;
``python -m pdserve.model_store [MODEL]`` prints it.

    missing --(lock, convert into a temporary directory, check, rename)--> present
A directory under its final name is complete: two at once wait for each other, and a killed one leaves nothing behind
but a temporary directory that the next one removes.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve import smollm2
from pdserve.cache import cache_dir

DEFAULT_MODEL_NAME = "smollm2-135m-instruct"
# Raise the number when the conversion changes: directories of older conversions are then made anew.
_DEFAULT_MODEL_DIRECTORY = f"{DEFAULT_MODEL_NAME}-2"
_LOCK_TIMEOUT_S = 600.0
NEEDED_BYTES = 400 << 20
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


class ModelUnavailableError(Exception):
    """The model cannot be had; one line that names the remedy."""


def default_model_path() -> Path | None:
    """The default model's directory if it is there already."""
    path = cache_dir() / "models" / _DEFAULT_MODEL_DIRECTORY
    return path if path.is_dir() else None


def resolve_model(name_or_dir: str | None) -> Path:
    """A model directory from what ``--model`` says: None or the default's name, a directory, or a hub name (org/name).

    Raises: ModelUnavailableError.
    """
    if name_or_dir is None or name_or_dir.lower() == DEFAULT_MODEL_NAME:
        return prepare_default_model()
    directory = Path(name_or_dir).expanduser()
    try:
        if directory.is_dir():
            (directory / "config.json").open("rb").close()
            return directory.resolve()
    except FileNotFoundError as error:
        raise ModelUnavailableError(f"{directory} has no config.json: name a Hugging Face model directory") from error
    except OSError as error:
        path = error.filename or directory
        raise ModelUnavailableError(
            f"{path} cannot be read ({error.strerror}): let this process's user read it"
        ) from error
    if name_or_dir.count("/") == 1 and not name_or_dir.startswith((".", "/", "~")):
        return _download(name_or_dir)
    raise ModelUnavailableError(
        f"no such model: {name_or_dir!r} is neither a directory, nor a hub name (org/name), nor {DEFAULT_MODEL_NAME}"
    )


def name_in_api(name_or_dir: str | None) -> str:
    """The name of that model that clients use, where none is given: the hub name, or the directory's name."""
    if name_or_dir is None or name_or_dir.lower() == DEFAULT_MODEL_NAME:
        return DEFAULT_MODEL_NAME
    directory = Path(name_or_dir).expanduser()
    return directory.resolve().name if directory.is_dir() else name_or_dir


def prepare_default_model(on_progress: Callable[[int, int], None] | None = None) -> Path:
    """The default model's directory, converted now if it is not there yet (some seconds, once).

    ``on_progress(done, total)`` counts tensors; None draws a progress bar on stderr.
    Raises: ModelUnavailableError.
    """
    path = cache_dir() / "models" / _DEFAULT_MODEL_DIRECTORY
    if path.is_dir():
        return path
    models = path.parent
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _locked(models / f".{DEFAULT_MODEL_NAME}.lock"):
            if not path.is_dir():
                _convert_default_model(path, on_progress)
    except smollm2.ConversionError as error:
        raise ModelUnavailableError(str(error)) from error
    except OSError as error:
        raise ModelUnavailableError(
            f"the cache {cache_dir()} cannot be written ({error.strerror or error}): "
            f"set PDSERVE_CACHE to a directory that can"
        ) from error
    return path


def _convert_default_model(path: Path, on_progress: Callable[[int, int], None] | None) -> None:
    """Convert into a temporary directory beside ``path``, check, rename. Called with the lock held."""
    gguf_file = smollm2.find_gguf()
    prefix = f".{path.name}-tmp-"
    for leftover in path.parent.glob(f"{prefix}*"):  # of a killed conversion: we hold the lock, so nobody is writing
        shutil.rmtree(leftover)
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < NEEDED_BYTES:
        raise ModelUnavailableError(
            f"the cache {cache_dir()} has {free_bytes >> 20} MiB free and the model needs {NEEDED_BYTES >> 20}: "
            f"set PDSERVE_CACHE to a larger disk"
        )
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=path.parent))
    try:
        with _progress_bar("Converting the default model") if on_progress is None else _given(on_progress) as report:
            smollm2.convert(gguf_file, temporary, report)
        smollm2.check(temporary)
        temporary.chmod(0o755)
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # gone already when renamed


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_PATTERNS))
    except Exception as error:  # the hub client raises its own, httpx's and OS errors; all mean the same here
        first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ModelUnavailableError(
            f"{name} cannot be had from the Hugging Face hub ({first_line}): check the name, the network and "
            f"HF_TOKEN, or download it elsewhere and name its directory"
        ) from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on ``path``; the system releases it when the process dies."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelUnavailableError(
                        f"another process has held {path} for {_LOCK_TIMEOUT_S:.0f} s: end it and try again"
                    ) from None
                time.sleep(0.1)
        yield


@contextmanager
def _progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def _given(on_progress: Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
    yield on_progress


def main() -> int:
    """Print the directory of the model named on the command line (default: the default model)."""
    parser = argparse.ArgumentParser(prog="python -m pdserve.model_store", description=main.__doc__)
    parser.add_argument("model", nargs="?", help="directory, hub name, or nothing for the default model")
    try:
        print(resolve_model(parser.parse_args().model))
    except ModelUnavailableError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
