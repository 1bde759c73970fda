"""A CUDA device that computes nothing: to see, without a GPU, which kernels an engine launches, and to compile them.

Not a test module. Tensors are torch's fakes (shapes, strides and storage offsets are true, there are no elements),
Triton is told the architecture by a driver of our own, and a launch ends when Triton knows what it would compile: the
specialisation of arguments, which decides that, is Triton's own. So the engine's code runs as it is on a device.

    engine code -> kernel[grid](...) -> JITFunction.run -> Launch, one for each kernel that would be compiled
    Launch.compile() -> kernel.warmup(...) -> TTIR .. PTX -> ptxas -> cubin
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
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


@dataclass(frozen=True, slots=True)
class Launch:
    """The first one that a compiled kernel serves."""

    name: str
    arch: int
    key: str
    """What Triton tells compiled kernels of one function apart by."""
    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name} sm_{self.arch} {self.key}"

    def compile(self) -> Compiled:
        with _triton_for(self.arch):
            built = self.kernel.warmup(*self.arguments, grid=(1,), **self.options)
        return read_cubin(self.name, built.asm["cubin"], built.metadata.shared)


class _Driver:
    """As much of a driver as specialising and compiling need. Each architecture is a device of its own, as Triton keeps
    what it knows of a target by device."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

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


class _Graph:
    """A capture's launches are launches."""

    def capture_begin(self, **_: object) -> None: ...

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
def offline_gpu(arch: int) -> Iterator[dict[tuple[str, str], Launch]]:
    """Inside, torch's CUDA tensors are fakes of such a device, and launches are noted by name and key."""
    launches: dict[tuple[str, str], Launch] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        keys: list[str] = []

        def on_miss(*_: object, key: str, **__: object) -> bool:
            keys.append(key)
            return True  # not compiled now

        with mock.patch.object(knobs.runtime, "jit_cache_hook", on_miss):
            original(self, *args, grid=grid, warmup=True, **kwargs)
        for key in keys:
            launch = Launch(self.fn.__name__, arch, key, self, args, kwargs)
            launches.setdefault((launch.name, key), launch)

    original = JITFunction.run
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
        "Event": SimpleNamespace,
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
        stack.enter_context(mock.patch.object(FakeTensor, "copy_", lambda tensor, *_, **__: tensor))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor, *_, **__: tensor))
        stack.enter_context(fakes)
        yield launches


def _nothing(*_: object, **__: object) -> None: ...


def _address(tensor: FakeTensor) -> int:
    """Of no memory: another one for each storage, aligned as torch's allocator does it."""
    return (tensor.untyped_storage()._cdata << 9) + tensor.storage_offset() * tensor.itemsize


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


def read_cubin(name: str, cubin: bytes, shared_bytes: int) -> Compiled:
    """By ``cuobjdump``, which comes with Triton; what is asked for at the launch is not in the cubin."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK):(\d+)", said)}
    return Compiled(name, shared_bytes, found["REG"], found["STACK"])
