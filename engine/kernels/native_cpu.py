"""The kernels in C, compiled on this machine: what a CPU runs where there is a compiler.

Owns the way from tensors to pointers; the arithmetic is in ``native/``. Shapes and dtypes that the C code does not
cover (float16, head sizes that are no multiple of 16, ...) go to the torch kernels, one by one.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_long, c_void_p

import torch

from engine.kernels import QKV, AddNorm, Linear, compose_qkv
from engine.kernels.native_build import load_library
from engine.kernels.torch_cpu import TorchKernels

_MAX_HEAD_DIM = 256
_MAX_GROUP = 16
_MAX_CONTEXT_TOKENS = 1 << 20


class _PackArgs(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("packed", c_void_p),
        ("outputs", c_long),
        ("inputs", c_long),
        ("bf16", c_int),
    )


class _NormArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "residual", "weight", "out")),
        ("rows", c_long),
        ("width", c_long),
        ("eps", c_float),
        ("bf16", c_int),
    )


class _SiluArgs(ctypes.Structure):
    _fields_ = (("gate_up", c_void_p), ("out", c_void_p), ("rows", c_long), ("width", c_long), ("bf16", c_int))


class _LinearArgs(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, c_long) for name in ("rows", "outputs", "inputs")),
        ("bf16", c_int),
        ("out_bf16", c_int),
        ("gated", c_int),
    )


class _RopeArgs(ctypes.Structure):
    _fields_ = (
        *((n, c_void_p) for n in ("q", "k", "v", "cos_sin", "positions", "slots", "kv_layer", "q_norm", "k_norm")),
        *((n, c_long) for n in ("stride", "tokens", "heads", "kv_heads", "head_dim", "block_size")),
        ("eps", c_float),
        ("bf16", c_int),
    )


class _AttentionArgs(ctypes.Structure):
    _fields_ = (
        *((n, c_void_p) for n in ("q", "kv_layer", "block_table", "cu_seqlens", "seq_lens", "out")),
        *((n, c_long) for n in ("stride", "requests", "max_blocks", "heads", "kv_heads", "head_dim", "block_size")),
        ("window", c_long),
        ("scale", c_float),
        ("bf16", c_int),
    )


class NativeKernels:
    """See ``engine.kernels.Kernels``. Inputs that are dead after the call may be overwritten."""

    name = "native"

    def __init__(self) -> None:
        """Raises KernelsUnavailableError."""
        library = load_library()
        self._torch = TorchKernels()
        self._set_threads = library.set_threads
        self._linear = library.linear
        self._pack_weight = library.pack_weight
        self._norm = library.fused_add_rms_norm
        self._silu = library.silu_and_mul
        self._rope = library.rope_kv_write
        self._attention = library.paged_attention
        multiplies = library.linear_dtypes()
        self._linear_dtypes = {dtype for bit, dtype in ((1, torch.float32), (2, torch.bfloat16)) if multiplies & bit}

    def set_num_threads(self, num_threads: int) -> None:
        # What is left to torch is small: its own pool of threads would only fight with this one for the cores.
        torch.set_num_threads(1)
        self._set_threads(num_threads)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        if weight.dtype not in self._linear_dtypes or weight.shape[0] % 16 or weight.shape[1] % 2:
            return self._torch.linear(weight, bias, out_dtype)
        return self._pack(weight, bias, out_dtype or weight.dtype, gated=False)

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if weight.dtype not in self._linear_dtypes or weight.shape[0] % 32 or weight.shape[1] % 2:
            multiply = self.linear(weight, bias)
            return lambda x: self.silu_and_mul(multiply(x))

        def alternate(x: torch.Tensor) -> torch.Tensor:
            return x.view(2, -1, 16, *x.shape[1:]).transpose(0, 1).reshape(x.shape)

        return self._pack(alternate(weight), None if bias is None else alternate(bias), weight.dtype, gated=True)

    def _pack(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, gated: bool) -> Linear:
        outputs, inputs = weight.shape
        packed = torch.empty(-(-outputs // 64) * 64, inputs, dtype=weight.dtype)
        bf16 = weight.dtype == torch.bfloat16
        weight = weight.contiguous()
        self._pack_weight(byref(_PackArgs(weight.data_ptr(), packed.data_ptr(), outputs, inputs, bf16)))
        return _NativeLinear(self._linear, packed, bias, outputs, out_dtype, gated)

    def linear_add_norm(
        self, weight: torch.Tensor, bias: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, *, plain: bool
    ) -> AddNorm:
        multiply = self.linear(weight, bias)
        return lambda x, residual: self.fused_add_rms_norm(multiply(x), residual, norm_weight, eps)

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
        return compose_qkv(self, weight, bias, num_heads, num_kv_heads, cos_sin, q_norm_weight, k_norm_weight, eps)

    def fused_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = x.shape
        if width % 16 or not _covered(x) or not (residual is None or residual.is_contiguous()):
            return self._torch.fused_add_rms_norm(x, residual, weight, eps)
        bf16 = x.dtype == torch.bfloat16
        out = torch.empty_like(x) if residual is None else x
        stream = None if residual is None else residual.data_ptr()
        self._norm(byref(_NormArgs(x.data_ptr(), stream, weight.data_ptr(), out.data_ptr(), rows, width, eps, bf16)))
        return out, x if residual is None else residual

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        if width % 32 or not _covered(gate_up):
            return self._torch.silu_and_mul(gate_up)
        out = gate_up.new_empty(rows, width // 2)
        bf16 = gate_up.dtype == torch.bfloat16
        self._silu(byref(_SiluArgs(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, bf16)))
        return out

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
    ) -> torch.Tensor:
        tokens, heads, head_dim = q.shape
        stride = q.stride(0)
        same_rows = stride == k.stride(0) == v.stride(0) and q.stride(1) == k.stride(1) == v.stride(1) == head_dim
        if head_dim % 16 or head_dim > _MAX_HEAD_DIM or not same_rows or not _covered(kv_layer):
            return self._torch.rope_kv_write(
                q, k, v, cos_sin, positions, slot_mapping, kv_layer, q_norm_weight, k_norm_weight, eps
            )
        args = _RopeArgs(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            kv_layer.data_ptr(),
            None if q_norm_weight is None else q_norm_weight.data_ptr(),
            None if k_norm_weight is None else k_norm_weight.data_ptr(),
            stride,
            tokens,
            heads,
            k.shape[1],
            head_dim,
            kv_layer.shape[3],
            eps,
            kv_layer.dtype == torch.bfloat16,
        )
        self._rope(byref(args))
        return q

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
    ) -> torch.Tensor:
        tokens, heads, head_dim = q.shape
        kv_heads, block_size = kv_layer.shape[2:4]
        if (
            head_dim % 16
            or head_dim > _MAX_HEAD_DIM
            or heads // kv_heads > _MAX_GROUP
            or q.stride(1) != head_dim
            or not _covered(kv_layer)
            or block_table.shape[1] * block_size > _MAX_CONTEXT_TOKENS
        ):
            return self._torch.paged_attention(
                q, kv_layer, block_table, cu_seqlens_q, seq_lens, scale, max_q_len, window
            )
        out = q.new_empty(tokens, heads, head_dim)
        args = _AttentionArgs(
            q.data_ptr(),
            kv_layer.data_ptr(),
            block_table.data_ptr(),
            cu_seqlens_q.data_ptr(),
            seq_lens.data_ptr(),
            out.data_ptr(),
            q.stride(0),
            seq_lens.shape[0],
            block_table.shape[1],
            heads,
            kv_heads,
            head_dim,
            block_size,
            window or 0,
            scale,
            kv_layer.dtype == torch.bfloat16,
        )
        if self._attention(byref(args)):
            raise MemoryError("no memory for the attention kernel's scratch space")
        return out


class _NativeLinear:
    """One packed weight. The argument block is kept, and only what changes is set at a call."""

    __slots__ = ("_args", "_args_ref", "_bias", "_call", "_out_dtype", "_outputs", "_weight")

    def __init__(
        self,
        call: ctypes._NamedFuncPointer,
        packed: torch.Tensor,
        bias: torch.Tensor | None,
        outputs: int,
        out_dtype: torch.dtype,
        gated: bool,
    ) -> None:
        self._call = call
        self._weight = packed
        self._bias = None if bias is None else bias.float()
        self._outputs = outputs // 2 if gated else outputs
        self._out_dtype = out_dtype
        self._args = _LinearArgs(
            weight=packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            outputs=outputs,
            inputs=packed.shape[1],
            bf16=packed.dtype == torch.bfloat16,
            out_bf16=out_dtype == torch.bfloat16,
            gated=gated,
        )
        self._args_ref = byref(self._args)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        out = torch.empty(x.shape[0], self._outputs, dtype=self._out_dtype)
        self._args.x, self._args.out, self._args.rows = x.data_ptr(), out.data_ptr(), x.shape[0]
        if self._call(self._args_ref):
            raise MemoryError("no memory for the matrix product's scratch space")
        return out


def _covered(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float32, torch.bfloat16) and x.is_contiguous()
