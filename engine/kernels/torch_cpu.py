"""The kernels in plain torch, fast enough to serve with: what a CPU runs where the native ones cannot be built.

Owns the oneDNN prepacking of weights (1.3 to 3 times ``F.linear``) and an attention by matrix products over gathered
blocks, with the query heads of a KV head folded into one matrix (``scaled_dot_product_attention`` with ``enable_gqa``
is 7 to 16 times slower at decode).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.kernels import QKV, AddNorm, Linear, compose_qkv, reference

# Weights are packed for about this many rows: best or equal at every batch size tried (1 to 512).
_PACK_ROWS = 256
# Queries of a prefill that share one matrix product: bounds the masked-out half of the score matrix.
_QUERY_CHUNK = 128


class TorchKernels:
    """Stateless; see ``engine.kernels.Kernels``."""

    name = "torch"

    def set_num_threads(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None = None) -> Linear:
        mkldnn = getattr(torch.ops, "mkldnn", None)
        packs = hasattr(mkldnn, "_reorder_linear_weight") and hasattr(mkldnn, "_linear_pointwise")
        if not packs or weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
            return lambda x: F.linear(x, weight, bias).to(out_dtype or weight.dtype)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        multiply = torch.ops.mkldnn._linear_pointwise.default

        def run(x: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = multiply(x, packed, bias, "none", [], "")
            return product if out_dtype is None else product.to(out_dtype)

        return run

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        multiply = self.linear(weight, bias)
        return lambda x: self.silu_and_mul(multiply(x))

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
        residual = x if residual is None else x + residual
        return F.rms_norm(residual, weight.shape, weight, eps), residual

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

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
        return reference.rope_kv_write(
            q, k, v, cos_sin, positions, slot_mapping, kv_layer, q_norm_weight, k_norm_weight, eps
        )

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
        q_lens = cu_seqlens_q.diff()
        if max_q_len == 1:
            return _decode(q, kv_layer, block_table, seq_lens, scale, window)
        out = q.new_empty(q.shape)
        decodes = (q_lens == 1).nonzero().flatten()
        if len(decodes):
            rows = cu_seqlens_q[decodes]
            out[rows] = _decode(q[rows], kv_layer, block_table[decodes], seq_lens[decodes], scale, window)
        bounds, lens = cu_seqlens_q.tolist(), seq_lens.tolist()
        for row in (q_lens > 1).nonzero().flatten().tolist():
            share = slice(bounds[row], bounds[row + 1])
            _prefill(q[share], kv_layer, block_table[row], lens[row], scale, window, out[share])
        return out


def _decode(
    q: torch.Tensor,  # [B, H, D]
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """All requests in one product each for scores and values, padded to the longest."""
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    requests, max_blocks = block_table.shape
    blocks = kv_layer.index_select(0, block_table.flatten()).view(
        requests, max_blocks, 2, num_kv_heads, block_size, head_dim
    )
    # [B, M, 2, K, S, D] -> [2, B, K, tokens, D]
    keys, values = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).float()
    key_at = torch.arange(max_blocks * block_size)
    hidden = key_at >= seq_lens.unsqueeze(1)
    if window is not None:
        hidden |= key_at < seq_lens.unsqueeze(1) - window
    scores = torch.matmul(q.reshape(requests, num_kv_heads, -1, head_dim).float(), keys.transpose(2, 3)).mul_(scale)
    weights = scores.masked_fill_(hidden[:, None, None], float("-inf")).softmax(-1)
    # What lies in slots of nobody may be anything; times a weight of zero it must be nothing.
    values.masked_fill_(hidden[:, None, :, None], 0.0)
    return torch.matmul(weights, values).view(q.shape).to(q.dtype)


def _prefill(
    q: torch.Tensor,  # [T, H, D]
    kv_layer: torch.Tensor,
    block_table: torch.Tensor,  # [M]
    seq_len: int,
    scale: float,
    window: int | None,
    out: torch.Tensor,  # [T, H, D]
) -> None:
    """One request, a chunk of queries after the other."""
    num_kv_heads, block_size, head_dim = kv_layer.shape[2:]
    group = q.shape[1] // num_kv_heads
    # [blocks, 2, K, S, D] -> [2, K, tokens, D]
    blocks = kv_layer.index_select(0, block_table[: -(-seq_len // block_size)])
    keys, values = blocks.permute(1, 2, 0, 3, 4).flatten(2, 3)
    for start in range(0, len(q), _QUERY_CHUNK):
        end = min(start + _QUERY_CHUNK, len(q))
        past = seq_len - len(q) + start  # tokens before the first query of the chunk
        total = past + (end - start)  # tokens that the last query sees
        first = 0 if window is None else max(0, past - window + 1)
        # [queries, H, D] -> [K, group * queries, D]
        folded = q[start:end].reshape(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
        # In float32: rounded to bfloat16, a score of 100 would be off by up to 1/4.
        scores = torch.matmul(folded.float(), keys[:, first:total].float().transpose(1, 2)).mul_(scale)
        scores = scores.view(num_kv_heads, group, end - start, total - first)
        scores.masked_fill_(_hidden(past, total, first, window), float("-inf"))
        weights = scores.softmax(-1).to(q.dtype).flatten(1, 2)
        mixed = torch.matmul(weights, values[:, first:total])
        out[start:end] = mixed.view(num_kv_heads, group, -1, head_dim).permute(2, 0, 1, 3).flatten(1, 2)


def _hidden(past: int, total: int, first: int, window: int | None) -> torch.Tensor:
    """[queries, keys] True where the query at ``past + i`` must not see the key at ``first + j``."""
    query_at = torch.arange(past, total).unsqueeze(1)
    key_at = torch.arange(first, total)
    hidden = key_at > query_at
    return hidden if window is None else hidden | (key_at <= query_at - window)
