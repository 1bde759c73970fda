"""Every kernel in plain torch: the oracle that the fast ones are tested against, for any dtype (float64 too).

Owns the meaning of the kernels' signatures; is written to be read, not to be fast. Half precision is computed in
float32 and rounded once at the end.

Shape letters: T tokens, B requests, M blocks per request, H query heads, K KV heads, D head dim, N blocks in the pool,
S block size, P positions of the rope table, I intermediate size.
"""

from __future__ import annotations

import torch


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root mean square norm over the last dimension."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * _wide(weight)).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor,  # [T, hidden]
    residual: torch.Tensor | None,  # [T, hidden]
    weight: torch.Tensor,  # [hidden]
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``; None: the residual stream starts here."""
    residual = x if residual is None else x + residual
    return rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:  # [T, 2I] -> [T, I]
    """``silu(gate) * up`` of the two halves."""
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rope_kv_write(
    q: torch.Tensor,  # [T, H, D]
    k: torch.Tensor,  # [T, K, D]
    v: torch.Tensor,  # [T, K, D]
    cos_sin: torch.Tensor,  # [P, D]: D/2 cosines, then D/2 sines
    positions: torch.Tensor,  # [T]
    slot_mapping: torch.Tensor,  # [T]: block_id * S + offset
    kv_layer: torch.Tensor,  # [N, 2, K, S, D], written
    q_norm_weight: torch.Tensor | None = None,  # [D]
    k_norm_weight: torch.Tensor | None = None,  # [D]
    eps: float = 1e-6,
) -> torch.Tensor:
    """Norm (if weights are given) and rotate queries and keys, write keys and values to their slots.

    Returns:
        The rotated queries [T, H, D]. ``q`` may have been overwritten.
    """
    if q_norm_weight is not None:
        q = rms_norm(q, q_norm_weight, eps)
    if k_norm_weight is not None:
        k = rms_norm(k, k_norm_weight, eps)
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = _wide(x).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    block_size = kv_layer.shape[3]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    kv_layer[block_ids, 0, :, offsets] = rotate(k).to(kv_layer.dtype)
    kv_layer[block_ids, 1, :, offsets] = v.to(kv_layer.dtype)
    return rotate(q)


def paged_attention(
    q: torch.Tensor,  # [T, H, D]
    kv_layer: torch.Tensor,  # [N, 2, K, S, D]
    block_table: torch.Tensor,  # [B, M] int32
    cu_seqlens_q: torch.Tensor,  # [B+1] int32
    seq_lens: torch.Tensor,  # [B] int32: tokens in the cache, those of this step included
    scale: float,
    max_q_len: int,  # longest of the B requests' shares of T; a hint for kernels that launch a grid
    window: int | None = None,  # a query sees itself and window - 1 tokens before it
) -> torch.Tensor:  # [T, H, D]
    """Causal attention of each request's last tokens over its blocks."""
    num_heads = q.shape[1]
    num_kv_heads, block_size = kv_layer.shape[2:4]
    out = q.new_empty(q.shape)
    bounds = cu_seqlens_q.tolist()
    for row, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[row], bounds[row + 1]
        blocks = block_table[row, : -(-seq_len // block_size)].long()
        # [blocks, 2, K, S, D] -> [2, K, tokens, D] -> each KV head repeated for its query heads
        kv = kv_layer[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]
        keys, values = _wide(kv).repeat_interleave(num_heads // num_kv_heads, dim=1)
        scores = torch.einsum("qhd,hkd->hqk", _wide(q[start:end]) * scale, keys)
        query_at = torch.arange(seq_len - (end - start), seq_len, device=q.device).unsqueeze(1)
        key_at = torch.arange(seq_len, device=q.device)
        hidden = key_at > query_at
        if window is not None:
            hidden |= key_at <= query_at - window
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("hqk,hkd->qhd", probabilities, values).to(q.dtype)
    return out
