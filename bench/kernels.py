"""Times every GPU kernel against the device's ceilings and against what peers reach on the same kind of GPU.

    python -m bench.kernels --output kernels.json [--only decode,prefill,...] [--check]

``--check`` runs the GPU tests first (all kernels against float64). Times are medians of CUDA graph replays (see
``kernel_timing``); inputs are random; what would fit into the L2 cache rotates over several buffers. The short table
comes last; FlashInfer's figures and the targets are in ``goals``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.goals import (
    DECODE_BYTES_PER_US,
    FLASHINFER_CASCADE,
    FLASHINFER_DECODE,
    TARGET_CASCADE,
    TARGET_DECODE,
)
from bench.kernel_timing import Call, median_us
from engine.kernels import elementwise
from engine.kernels.cascade_attention import CascadePlan
from engine.kernels.cascade_plan import CascadeCost
from engine.kernels.decode_attention import DecodePlan, paged_decode
from engine.kernels.kv_pack import ROW_WORDS, Job, move_kv, words_of
from engine.kernels.prefill_attention import paged_prefill
from engine.kernels.sampling import DrawParams, TokenDrawer
from engine.kernels.triton_gpu import TritonKernels

CUDA, BF16 = torch.device("cuda"), torch.bfloat16
D = 128


@dataclass(frozen=True, slots=True)
class Row:
    """One measured line. ``limit_us`` is the larger of bytes / copy rate and flops / matrix rate, of the ceilings."""

    work: str
    us: float
    num_bytes: float
    flops: float
    limit_us: float
    peer: str = ""
    peer_us: float | None = None
    target_us: float | None = None


class Bench:
    """Collects rows; the ceilings are measured first, on this device."""

    def __init__(self) -> None:
        source = torch.randint(2**31, (1 << 29,), dtype=torch.int32, device=CUDA)
        target = torch.empty_like(source)
        # A kernel, not copy_: a captured copy is a memcpy node, which is slower.
        self.bytes_per_us = 2 * source.nbytes / median_us([partial(torch.neg, source, out=target)])
        a, b = (torch.randn(8192, 8192, device=CUDA, dtype=BF16) for _ in range(2))
        self.flops_per_us = 2 * 8192**3 / median_us([lambda: a @ b])
        self.rows: list[Row] = []
        print(
            f"copy {self.bytes_per_us / 1e6:.2f} TB/s, bf16 product {self.flops_per_us / 1e6:.0f} TFLOP/s", flush=True
        )

    def add(
        self, work: str, us: float, num_bytes: float = 0.0, flops: float = 0.0, peer: str = "",
        peer_us: float | None = None, target_us: float | None = None,
    ) -> None:  # fmt: skip
        limit = max(num_bytes / self.bytes_per_us, flops / self.flops_per_us)
        self.rows.append(Row(work, us, num_bytes, flops, limit, peer, peer_us, target_us))
        print(f"{work}: {us:.1f} us", flush=True)

    def table(self) -> str:
        lines = [f"{'work':46} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'limit us':>9} {'target':>8}  peer"]
        for row in self.rows:
            rate = f"{row.num_bytes / row.us / 1e6:.2f}" if row.num_bytes else "-"
            flops = f"{row.flops / row.us / 1e6:.0f}" if row.flops else "-"
            target = f"{row.target_us:.0f}" if row.target_us else "-"
            peer = f"{row.peer} {row.peer_us:.1f}" if row.peer_us else "-"
            lines.append(f"{row.work:46} {row.us:9.1f} {rate:>6} {flops:>8} {row.limit_us:9.1f} {target:>8}  {peer}")
        return "\n".join(lines)


class PagedCase:
    """Requests of one length in shuffled blocks; ``layers`` of them, so that together they do not fit the L2 cache."""

    def __init__(
        self, requests: int, length: int, heads: int, kv_heads: int, block_size: int, *, queries: int = 1
    ) -> None:
        blocks = requests * length // block_size
        num_bytes = blocks * block_size * kv_heads * D * 4
        layers = max(1, min(16, int(3e8 // num_bytes)))
        self.num_bytes, self.scale = num_bytes, D**-0.5
        shape = (blocks, 2, kv_heads, block_size, D)
        self.layers = [torch.randn(shape, device=CUDA, dtype=BF16) for _ in range(layers)]
        self.table = torch.randperm(blocks, device=CUDA).int().view(requests, -1)
        self.lens = torch.full((requests,), length, device=CUDA, dtype=torch.int32)
        self.cu = torch.arange(0, requests * queries + 1, queries, device=CUDA, dtype=torch.int32)
        self.q = torch.randn(requests * queries, heads, D, device=CUDA, dtype=BF16)


def bench_decode(bench: Bench) -> None:
    for (requests, length), peer_us in FLASHINFER_DECODE.items():
        for block_size in (16, 64):
            case = PagedCase(requests, length, 32, 8, block_size)
            plan = DecodePlan(requests, 32, 8, D, CUDA)
            plan.update(case.lens)
            calls = [partial(paged_decode, case.q, kv, case.table, case.lens, case.scale, plan) for kv in case.layers]
            target = TARGET_DECODE.get((requests, length), case.num_bytes / DECODE_BYTES_PER_US)
            work = f"decode b={requests} ctx {length} 32/8 block {block_size}"
            peer = peer_us if block_size == 16 else None
            bench.add(work, median_us(calls), case.num_bytes, peer="FlashInfer", peer_us=peer, target_us=target)
    plan = DecodePlan(256, 32, 8, D, CUDA)
    lens = torch.full((256,), 1024, device=CUDA, dtype=torch.int32)
    bench.add("decode plan b=256 (once a step)", median_us([partial(plan.update, lens)]))


def bench_prefill(bench: Bench) -> None:
    for requests, length, heads in (
        (1, 512, 32),
        (1, 2048, 32),
        (16, 2048, 32),
        (1, 8192, 32),
        (1, 32768, 32),
        (1, 8192, 16),
    ):
        flops = 2.0 * requests * heads * D * length**2
        q, k, v = (torch.randn(requests, heads, length, D, device=CUDA, dtype=BF16) for _ in range(3))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            peer_us = median_us([partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)])
        for block_size in (16, 64):
            case = PagedCase(requests, length, heads, 8, block_size, queries=length)
            out = torch.empty_like(case.q)
            layer = case.layers[0]
            call = partial(paged_prefill, case.q, layer, case.table, case.cu, case.lens, case.scale, length, None, out)
            work = f"prefill {requests} x {length} {heads}/8 block {block_size}"
            bench.add(work, median_us([call]), flops=flops, peer="cuDNN, not paged, MHA", peer_us=peer_us)


def bench_cascade(bench: Bench) -> None:
    for shape, (flat_peer, peer_us) in FLASHINFER_CASCADE.items():
        requests, shared, own, heads, kv_heads = shape
        block_size = 16
        blocks = shared // block_size
        kv = torch.randn(blocks + requests * own // block_size, 2, kv_heads, block_size, D, device=CUDA, dtype=BF16)
        ids = torch.randperm(len(kv), device=CUDA).int()
        table = torch.cat([ids[:blocks].expand(requests, -1), ids[blocks:].view(requests, -1)], 1).contiguous()
        lens = torch.full((requests,), shared + own, device=CUDA, dtype=torch.int32)
        q = torch.randn(requests, heads, D, device=CUDA, dtype=BF16)
        cascade = CascadePlan(requests, CascadeCost(num_heads=heads, num_kv_heads=kv_heads, head_dim=D), CUDA)
        cascade.regroup(table.cpu().numpy(), lens.cpu().numpy(), block_size)
        plan, flat = (DecodePlan(requests, heads, kv_heads, D, CUDA) for _ in range(2))
        plan.update(lens, prefix=cascade.prefix)
        flat.update(lens)
        work = f"b={requests} shared {shared} own {own} {heads}/{kv_heads}"
        flat_us = median_us([partial(paged_decode, q, kv, table, lens, 0.09, flat)], min_ms=1.0, repeats=3)
        bench.add(f"flat    {work}", flat_us, peer="FlashInfer flat", peer_us=flat_peer)

        calls: list[Call] = [partial(paged_decode, q, kv, table, lens, 0.09, plan)]
        if cascade.prefix is not None:
            calls.insert(0, partial(cascade.run, q, kv, table, 0.09))
        chosen = "cascade" if cascade.prefix is not None else "flat"
        num_bytes = (shared + requests * own) * kv_heads * D * 4.0
        flops = 4.0 * requests * (shared + own) * heads * D
        target = TARGET_CASCADE.get(shape, flat_us)
        bench.add(
            f"chosen {chosen}  {work}",
            len(calls) * median_us(calls),
            num_bytes,
            flops,
            "FlashInfer cascade",
            peer_us,
            target,
        )


def bench_products(bench: Bench) -> None:
    kernels = TritonKernels()
    for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)):
        weights = [torch.randn(n, k, device=CUDA, dtype=BF16) for _ in range(max(1, int(3e8 // (n * k * 2))))]
        linears = [kernels.linear(weight, None) for weight in weights]
        for rows in (1, 16, 64):
            x = torch.randn(rows, k, device=CUDA, dtype=BF16)
            ours = median_us([partial(f, x) for f in linears])
            peer = median_us([partial(F.linear, x, w) for w in weights])
            bench.add(f"product M={rows} N={n} K={k}", ours, n * k * 2.0, peer="cuBLAS", peer_us=peer)


def bench_fused_products(bench: Bench) -> None:
    """With what stands between them, beside the library's product and that pass. Many rows' sums are the library's."""
    kernels = TritonKernels()
    for n, k in ((28672, 4096), (4096, 4096), (4096, 14336)):
        weights = [torch.randn(n, k, device=CUDA, dtype=BF16) * 0.02 for _ in range(max(1, int(3e8 // (n * k * 2))))]
        norm_weight = torch.randn(n, device=CUDA, dtype=BF16)
        for rows in (1, 16, 32, 128, 1024, 2048, 8192):
            x = torch.randn(rows, k, device=CUDA, dtype=BF16)
            residual = torch.randn(rows, n, device=CUDA, dtype=BF16)
            ours: list[Call]
            peers: list[Call]
            if n == 28672:
                name = "SwiGLU"
                ours = [partial(kernels.gated_linear(w, None), x) for w in weights]
                peers = [partial(lambda w, x: elementwise.silu_and_mul(F.linear(x, w)), w, x) for w in weights]
            else:
                name = "sum + norm"
                ours = [
                    partial(kernels.linear_add_norm(w, None, norm_weight, 1e-5, plain=False), x, residual)
                    for w in weights
                ]
                peers = [
                    partial(
                        lambda w, x, r, g: elementwise.fused_add_rms_norm(F.linear(x, w), r, g, 1e-5),
                        w, x, residual, norm_weight,
                    )
                    for w in weights
                ]  # fmt: skip
            work = f"product + {name} M={rows} N={n} K={k}"
            peer_us = median_us(peers)
            bench.add(work, median_us(ours), n * k * 2.0, 2.0 * rows * n * k, f"cuBLAS, {name}", peer_us)


def bench_between(bench: Bench) -> None:
    for tokens in (1, 256, 8192):
        x, residual = (torch.randn(tokens, 4096, device=CUDA, dtype=BF16) for _ in range(2))
        weight = torch.randn(4096, device=CUDA, dtype=BF16)
        gate_up = torch.randn(tokens, 28672, device=CUDA, dtype=BF16)
        q, k, v = torch.randn(tokens, 48, D, device=CUDA, dtype=BF16).tensor_split((32, 40), 1)
        kv = torch.randn(tokens // 16 + 1, 2, 8, 16, D, device=CUDA, dtype=BF16)
        at = torch.arange(tokens, device=CUDA)
        cos_sin = torch.randn(tokens, D, device=CUDA)
        calls: list[tuple[str, Call, float]] = [
            (
                "add + RMSNorm",
                partial(elementwise.fused_add_rms_norm, x, residual, weight, 1e-6),
                4 * 4096,
            ),
            ("SwiGLU", partial(elementwise.silu_and_mul, gate_up), 1.5 * 28672),
            ("rope + KV write", partial(elementwise.rope_kv_write, q, k, v, cos_sin, at, at, kv), 2 * 48 * D),
        ]
        for name, call, elements in calls:
            bench.add(f"{name} T={tokens}", median_us([call]), elements * 2 * tokens)


def bench_sampling(bench: Bench) -> None:
    vocab_size = 128256
    for rows in (1, 32, 256):
        logits = torch.randn(rows, vocab_size, device=CUDA) * 3
        drawer = TokenDrawer(rows, CUDA)
        num_bytes = logits.nbytes
        torch_us = median_us([partial(torch.argmax, logits, -1)])
        greedy = median_us([partial(drawer.draw, logits)])
        bench.add(f"greedy R={rows}", greedy, num_bytes, peer="torch.argmax", peer_us=torch_us)
        sort_us = median_us([partial(torch.sort, logits, -1)], repeats=3)
        for name, (top_k, top_p) in {"temperature": (0, 1.0), "k 50, p 0.95": (50, 0.95), "p 0.95": (0, 0.95)}.items():
            params = DrawParams(
                torch.full((rows,), 0.8, device=CUDA), torch.full((rows,), top_k, dtype=torch.int32, device=CUDA),
                torch.full((rows,), top_p, device=CUDA), torch.zeros(rows, device=CUDA),
                torch.randint(2**31, (rows, 2), dtype=torch.int32, device=CUDA),
            )  # fmt: skip
            us = median_us([partial(drawer.draw, logits, params, cut=name != "temperature")])
            bench.add(f"draw R={rows} {name}", us, num_bytes, peer="torch.sort alone", peer_us=sort_us)


def bench_kv_pack(bench: Bench) -> None:
    cache = torch.randn(32, 512, 2, 8, 16, D, device=CUDA, dtype=BF16)
    table = torch.randperm(512, device=CUDA).int()
    for layers in (8, 32):
        wire = torch.empty(layers * 2 * 8 * 8192 * D * 2, dtype=torch.uint8, device=CUDA)
        planes = layers * 2 * 8
        jobs = torch.tensor([Job(wire.data_ptr(), planes, 0, 8192, 0, 0)], device=CUDA)
        row = torch.zeros(1, ROW_WORDS, dtype=torch.int64, device=CUDA)
        mix = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        for name in ("pack", "unpack"):
            move = partial(move_kv, words_of(cache), jobs, table, row, mix, 1, planes, 8192, pack=name == "pack")
            us = median_us([move])
            bench.add(f"{name} + digest 8192 tokens {layers} layers", us, 2.0 * wire.nbytes)


SECTIONS = {
    "decode": bench_decode, "prefill": bench_prefill, "cascade": bench_cascade, "products": bench_products,
    "fused": bench_fused_products,
    "between": bench_between, "sampling": bench_sampling, "kv_pack": bench_kv_pack,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--check", action="store_true", help="run the GPU tests first")
    arguments = parser.parse_args()
    unknown = set(arguments.only.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}: use {', '.join(SECTIONS)}")
    if not torch.cuda.is_available():
        parser.error("no CUDA device: these kernels are timed on one")
    if arguments.check:
        subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu", "tests/kernels"], check=True)
    torch.manual_seed(0)
    np.random.seed(0)
    bench = Bench()
    for name in arguments.only.split(","):
        SECTIONS[name](bench)
        torch.cuda.empty_cache()
    device = torch.cuda.get_device_name()
    result = {"device": device, "torch": torch.__version__, "rows": [asdict(row) for row in bench.rows]}
    arguments.output.write_text(json.dumps(result, indent=1))
    print(f"\n{device}\n{bench.table()}")


if __name__ == "__main__":
    main()
