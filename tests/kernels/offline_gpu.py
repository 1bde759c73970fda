"""A CUDA device that computes nothing: to see, without a GPU, which kernels an engine launches, and to compile them.

Not a test module. Tensors are torch's fakes (shapes, strides and storage offsets are true, there are no elements),
Triton is told the architecture by a driver of our own, and a launch ends when Triton knows what it would compile: the
specialisation of arguments, which decides that, is Triton's own. So the engine's code runs as it is on a device.

    engine code -> kernel[grid](...) or kernel.warmup(...) -> JITFunction.run -> noted, if it is not there yet
                                                                              -> TTIR .. PTX -> ptxas -> cubin
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""What a block may have at most: CUDA programming guide, technical specifications per compute capability."""
_SMS = {80: 108, 90: 132, 100: 148, 120: 170}
_MEMORY_BYTES = {80: 80 << 30, 90: 141 << 30, 100: 180 << 30, 120: 32 << 30}


@dataclass(frozen=True, slots=True)
class Compiled:
    """What can be read of a cubin."""

    name: str
    shared_bytes: int
    registers: int
    stack_bytes: int
    """Of a thread, in the device's memory: spilled registers, or arrays that did not fit into them."""
    sha256: str
    wgmmas: int
    waits: int
    """Until none is in flight. After each one, where ptxas does not see that nothing else touches their registers
    meanwhile; it says so to nobody, and a product takes a fifth longer."""


@dataclass(frozen=True, slots=True)
class Launches:
    """Kernels, by name and by what Triton tells compiled ones of a name apart by. Where launches compile, only those
    that were not there yet."""

    ahead: set[tuple[str, str]] = field(default_factory=set)
    """Asked for by ``compile_ahead``."""
    run: set[tuple[str, str]] = field(default_factory=set)


class _Driver:
    """As much of a driver as specialising and compiling need. Each architecture is a device of its own, as Triton keeps
    what it knows of a target by device."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.launcher_cls = lambda *_: _nothing
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES[arch]},
            load_binary=lambda *_: (None, None, 0, 0, 1024),
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0


class _Stream:
    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...


class _Event:
    def record(self) -> None: ...


class _Graph:
    """A capture's launches are launches."""

    def capture_begin(self, **_: object) -> None: ...

    def replay(self) -> None: ...

    def capture_end(self) -> None: ...


@contextmanager
def _triton_for(arch: int) -> Iterator[None]:
    driver.set_active(_Driver(arch))
    try:
        yield
    finally:
        if torch.cuda.is_available():  # else there is no driver to go back to, and nobody who needs one
            driver.reset_active()


@contextmanager
def offline_gpu(arch: int, *, compiles: bool) -> Iterator[Launches]:
    """Inside, torch's CUDA tensors are fakes of a device of that architecture, and launches run nothing; with
    ``compiles`` they compile what they need."""
    launches = Launches()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        def on_miss(*_: object, key: str, **__: object) -> bool:
            (launches.ahead if warmup else launches.run).add((self.fn.__name__, key))
            return not compiles  # True: do not compile it now

        with mock.patch.object(knobs.runtime, "jit_cache_hook", on_miss):
            original(self, *args, grid=grid, warmup=True, **kwargs)

    original, from_numpy = JITFunction.run, torch.from_numpy
    major, minor = divmod(arch, 10)
    properties = SimpleNamespace(multi_processor_count=_SMS[arch], total_memory=_MEMORY_BYTES[arch])
    cuda: dict[str, object] = {
        "get_device_capability": lambda *_: (major, minor),
        "get_device_properties": lambda *_: properties,
        "current_device": lambda: 0,
        "set_device": _nothing,
        "set_stream": _nothing,
        "current_stream": _Stream,
        "Stream": _Stream,
        "stream": lambda _: nullcontext(),
        "Event": _Event,
        "CUDAGraph": _Graph,
        "graph_pool_handle": lambda: (0, 0),
        "is_current_stream_capturing": lambda: False,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "reset_peak_memory_stats": _nothing,
        "max_memory_allocated": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "mem_get_info": lambda *_: (_MEMORY_BYTES[arch], _MEMORY_BYTES[arch]),
    }
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        stack.enter_context(_triton_for(arch))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        stack.enter_context(mock.patch.object(FakeTensor, "data_ptr", _address))
        stack.enter_context(mock.patch.object(FakeTensor, "__getitem__", _item))
        stack.enter_context(mock.patch.object(FakeTensor, "numpy", _array))
        stack.enter_context(mock.patch.object(FakeTensor, "copy_", lambda tensor, *_, **__: tensor))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor))
        # Its own result would be a constant when it has one element, and constants are computed with.
        stack.enter_context(mock.patch.object(torch, "from_numpy", lambda array: fakes.from_tensor(from_numpy(array))))
        stack.enter_context(fakes)
        yield launches


def _nothing(*_: object, **__: object) -> None: ...


def _address(tensor: FakeTensor) -> int:
    """Of no memory: another one for each storage, aligned as torch's allocator does it."""
    return (tensor.untyped_storage()._cdata << 9) + tensor.storage_offset() * tensor.itemsize


def _array(tensor: FakeTensor) -> np.ndarray[Any, Any]:
    """Memory of its own for what is packed into a fake on the host."""
    with unset_fake_temporarily():
        return torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()


def _item(tensor: FakeTensor, index: Any) -> torch.Tensor:
    """Indexing in a torch without CUDA asks for the device before the fake mode sees it. Steps are not needed here."""
    found: torch.Tensor = tensor
    dim = 0
    for part in index if isinstance(index, tuple) else (index,):
        if part is None:
            found = found.unsqueeze(dim)
            dim += 1
        elif isinstance(part, slice):
            start, stop, _ = part.indices(found.shape[dim])
            found = found.narrow(dim, start, max(0, stop - start))
            dim += 1
        elif isinstance(part, torch.Tensor):
            found = found.index_select(dim, part)
            dim += 1
        else:
            found = found.select(dim, part)
    return found


def read_cache(directory: Path) -> list[Compiled]:
    """What was compiled, by ``cuobjdump``, which comes with Triton; shared memory is not in the cubin."""
    return [_read(path, json.loads(path.with_suffix(".json").read_text())) for path in directory.glob("*/*.cubin")]


def _read(cubin: Path, metadata: dict[str, Any]) -> Compiled:
    code = ["--dump-sass"] if "wgmma" in cubin.with_suffix(".ptx").read_text() else []
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", *code, str(cubin)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK):(\d+)", said)}
    sha256 = hashlib.sha256(cubin.read_bytes()).hexdigest()
    wgmmas, waits = (len(re.findall(word, said)) for word in (r"\bHGMMA\.", r"\bWARPGROUP\.DEPBAR\S* gsb0, 0x0\b"))
    return Compiled(metadata["name"], metadata["shared"], found["REG"], found["STACK"], sha256, wgmmas, waits)
