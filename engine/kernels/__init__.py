"""What a device must offer to the layers, and who offers it.

A backend is an object with the kernels of ``reference.py`` (same names, same arguments) and matrix products, which take
over a weight in whatever form the device multiplies fastest. A new one is a module and a line in ``BACKENDS``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

import torch

Normed = Any
"""Rows that a backend has normed for its own products: a tensor, or, on a GPU, less than that (``DeferredNorm``)."""

Linear = Callable[[Normed], torch.Tensor]
"""``[T, in] -> [T, out]``, of a tensor or of what the same backend has normed."""

AddNorm = Callable[[torch.Tensor, torch.Tensor], tuple[Normed, torch.Tensor]]
"""``([T, in], [T, hidden]) -> (normed, [T, hidden])``. The second argument may be overwritten."""


class QKV(Protocol):
    def __call__(
        self,
        normed: Normed,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_layer: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``([T, hidden], [T], [T], ...) -> rotated queries [T, H, D]``; writes keys and values.

        With ``rows`` [R] the queries are those of these rows only, [R, H, D].
        """
        ...


class Kernels(Protocol):
    """See ``reference.py`` for the meaning of each kernel and of its arguments."""

    @property
    def name(self) -> str:
        """For the log and for ``doctor``."""
        ...

    def set_num_threads(self, num_threads: int) -> None:
        """From the next call on."""
        ...

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        """Take over ``weight`` [out, in] (and ``bias`` [out]), repacked if that helps. ``out_dtype``: None, its own."""
        ...

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """``silu(x @ gate.T) * (x @ up.T)``; ``weight`` [2 * out, in] is gate over up, ``bias`` likewise."""
        ...

    def linear_add_norm(
        self, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, *, plain: bool
    ) -> AddNorm:
        """From ``(x, residual)`` to ``(rms_norm(sum), sum)`` of ``sum = residual + x @ weight.T``.

        ``plain``: the normed rows are a tensor; otherwise only ``linear`` and ``gated_linear`` can read them.
        """
        ...

    def qkv_rope_kv_write(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        num_heads: int,
        num_kv_heads: int,
        cos_sin: torch.Tensor,
        q_norm_weight: torch.Tensor | None = None,
        k_norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> QKV:
        """The merged projections, ``weight`` [(H + 2K) * D, hidden] being q over k over v, then ``rope_kv_write``."""
        ...

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def rope_kv_write(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_layer: torch.Tensor,
        q_norm_weight: torch.Tensor | None = None,
        k_norm_weight: torch.Tensor | None = None,
        eps: float = 1e-6,
    ) -> torch.Tensor: ...

    def paged_attention(
        self,
        q: torch.Tensor,
        kv_layer: torch.Tensor,
        block_table: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        scale: float,
        max_q_len: int,
        window: int | None = None,
    ) -> torch.Tensor: ...


def compose_qkv(
    kernels: Kernels,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    cos_sin: torch.Tensor,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
    eps: float,
) -> QKV:
    """``Kernels.qkv_rope_kv_write`` of a backend's ``linear`` and ``rope_kv_write``."""
    multiply = kernels.linear(weight, bias)
    head_dim = weight.shape[0] // (num_heads + 2 * num_kv_heads)
    bounds = (num_heads, num_heads + num_kv_heads)

    def run(
        normed: Normed,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_layer: torch.Tensor,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        q, k, v = multiply(normed).view(len(normed), -1, head_dim).tensor_split(bounds, dim=1)
        rotated = kernels.rope_kv_write(
            q, k, v, cos_sin, positions, slot_mapping, kv_layer, q_norm_weight, k_norm_weight, eps
        )
        return rotated if rows is None else rotated[rows]

    return run


BACKENDS = {
    "native": "engine.kernels.native_cpu:NativeKernels",
    "torch": "engine.kernels.torch_cpu:TorchKernels",
    "triton": "engine.kernels.triton_gpu:TritonKernels",
}


class KernelsUnavailableError(RuntimeError):
    """Why a backend cannot be used on this machine, and what would help."""


def load_kernels(name: str) -> Kernels:
    """The backend of that name.

    Raises:
        KernelsUnavailableError: not on this machine.
    """
    if name not in BACKENDS:
        raise ValueError(f"kernel backend {name!r} is not known: use {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    kernels: Kernels = getattr(import_module(module), attribute)()
    return kernels


def fastest_kernels(device: torch.device) -> tuple[Kernels, str]:
    """The best backend that works here, and why a better one does not (empty if none would be)."""
    if device.type == "cuda":
        return load_kernels("triton"), ""
    if device.type != "cpu":
        return load_kernels("torch"), ""
    try:
        return load_kernels("native"), ""
    except KernelsUnavailableError as error:
        return load_kernels("torch"), str(error)
