"""Every Triton kernel on a CUDA device against float64, at real sizes, and inside CUDA graphs (``make test-gpu``)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engine.kernels import reference
from engine.kernels.decode_attention import DecodePlan, paged_decode
from engine.kernels.skinny_gemm import SkinnyTiling
from engine.kernels.triton_gpu import TritonKernels
from tests.kernels import attention_checks, paged_inputs, product_checks, sampling_checks, triton_checks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CUDA = torch.device("cuda")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = [700, 1, 17, 128, 1500, 129, 64, 333, 4097]
QUERIES = [100, 1, 17, 1, 1500, 65, 1, 200, 300]
HEADS = [(32, 8, 128), (32, 32, 128), (16, 8, 128), (9, 3, 64), (8, 1, 64), (40, 8, 96)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(torch.seed() % 2**31)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("block_size", "dtype", "window"), [(16, BF16, None), (32, F16, 300), (64, BF16, 5), (128, F32, None)]
)
def test_decode(heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, window: int | None) -> None:
    attention_checks.check_decode(CUDA, dtype, [*LENGTHS, 0], heads, block_size, window)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("block_size", "dtype", "window"), [(16, BF16, None), (32, F16, 300), (64, BF16, 100), (128, BF16, 5)]
)
def test_prefill(
    portable: bool, heads: tuple[int, int, int], block_size: int, dtype: torch.dtype, window: int | None
) -> None:
    attention_checks.check_prefill(CUDA, dtype, LENGTHS, QUERIES, heads, block_size, window, portable=portable)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("key_scales", [(4.0,), (0.02, 40.0), (40.0, 0.02), (0.1, 1.0, 4.0, 12.0, 20.0, 30.0)])
@pytest.mark.parametrize(("dtype", "window"), [(BF16, None), (F16, None), (BF16, 400)])
def test_prefill_where_maxima_move(
    portable: bool, key_scales: tuple[float, ...], dtype: torch.dtype, window: int | None
) -> None:
    """Scores in the hundreds, of which the highest come last, first, or step by step."""
    attention_checks.check_prefill(
        CUDA, dtype, [5000, 777], [700, 300], (32, 8, 128), 64, window, portable=portable, key_scales=key_scales
    )


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize(("spare", "window"), [((156, 25), None), ((4, 200), None), ((700, 25), 100)])
def test_prefill_among_requests_that_are_not_there(portable: bool, spare: tuple[int, int], window: int | None) -> None:
    attention_checks.check_prefill(
        CUDA, BF16, LENGTHS, QUERIES, (16, 8, 128), 64, window, portable=portable, spare=spare
    )


def test_prefill_in_float32() -> None:
    attention_checks.check_prefill(CUDA, F32, LENGTHS, QUERIES, (8, 2, 64), 16, portable=True, block_m=64, block_n=32)


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("heads", [(32, 8, 128), (32, 32, 128), (16, 8, 64)])
@pytest.mark.parametrize("block_size", [16, 64])
def test_cascade(portable: bool, heads: tuple[int, int, int], block_size: int) -> None:
    sizes = (2048 // block_size, 5120 // block_size)
    attention_checks.check_cascade(CUDA, BF16, heads, block_size, sizes, portable=portable)
    attention_checks.check_cascade(CUDA, BF16, heads, block_size, sizes, portable=portable, key_scales=(0.5, 2.0))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_between_the_products(dtype: torch.dtype) -> None:
    for rows, hidden in ((1, 4096), (300, 4096), (7, 576), (3, 14336)):
        triton_checks.check_norm_and_silu(CUDA, dtype, rows, hidden)
    for heads, norm in (((32, 8, 128), False), ((16, 8, 128), True), ((9, 3, 64), True)):
        triton_checks.check_rope(CUDA, dtype, 40, heads, 16, norm)


@pytest.mark.parametrize("rows", [1, 5, 16, 33, 64])
@pytest.mark.parametrize(
    "tiling",
    [
        None,
        SkinnyTiling(64, 256, tma=True, num_stages=2),
        SkinnyTiling(64, 128, split=4, tma=True),
        SkinnyTiling(128, 64, 2),
    ],
)
def test_skinny_product(rows: int, tiling: SkinnyTiling | None) -> None:
    product_checks.check_skinny(CUDA, BF16, (rows, 1000, 2048), tiling)


@pytest.mark.parametrize("rows", [1, 5, 32])
@pytest.mark.parametrize(
    "tiling",
    [
        SkinnyTiling(64, 256, tma=True),
        SkinnyTiling(64, 128, split=4, tma=True),
        SkinnyTiling(32, 256, num_stages=6, tma=True),
        SkinnyTiling(64, 128),
    ],
)
def test_products_with_what_stands_between_them(rows: int, tiling: SkinnyTiling) -> None:
    product_checks.check_gated(CUDA, BF16, (rows, 1000, 2048), tiling)
    product_checks.check_gated(CUDA, F16, (rows, 3072, 1024), tiling)
    product_checks.check_add_norm(CUDA, BF16, (rows, 1024, 2048), tiling)
    if tiling.split == 1:
        product_checks.check_qkv(CUDA, BF16, rows, 2048, (32, 8, 128), 64, tiling)
        product_checks.check_qkv(CUDA, F16, rows, 1024, (8, 2, 64), 16, tiling)


@pytest.mark.skipif(CAPABILITY != (9, 0), reason="Hopper's own instructions")
@pytest.mark.parametrize("rows", [1, 64, 127, 128, 129, 500, 2049])
@pytest.mark.parametrize(("inner", "hidden", "dtype"), [(128, 128, BF16), (1536, 576, F16), (14336, 4096, BF16)])
def test_gated_product_of_many_rows(rows: int, inner: int, hidden: int, dtype: torch.dtype) -> None:
    product_checks.check_gated_rows(CUDA, dtype, (rows, inner, hidden))


@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 2048), (576, 1536), (4096, 1024)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_products_through_the_backend(dtype: torch.dtype, hidden: int, inner: int, bias: bool) -> None:
    """Own products and the library's, whichever serve that many rows."""
    kernels = TritonKernels()

    def randn(*shape: int) -> torch.Tensor:
        return paged_inputs.randn(*shape, dtype=dtype, device=CUDA)

    up, up_bias = randn(2 * inner, hidden) * hidden**-0.5, randn(2 * inner)
    down, down_bias = randn(hidden, inner) * inner**-0.5, randn(hidden)
    norm_weight = randn(hidden)
    gated = kernels.gated_linear(up, up_bias if bias else None)
    for plain in (False, True):
        add_norm = kernels.linear_add_norm(down, down_bias if bias else None, norm_weight, 1e-5, plain=plain)
        for rows in (1, 32, 33, 300):
            x, residual = randn(rows, inner), randn(rows, hidden)
            total = residual.double() + x.double() @ down.double().T + (down_bias.double() if bias else 0.0)
            normed, stream = add_norm(x, residual)
            assert paged_inputs.relative_error(stream, total) < paged_inputs.tolerance(dtype)
            expected = reference.rms_norm(total, norm_weight.double(), 1e-5)
            if plain:
                assert paged_inputs.relative_error(normed, expected) < paged_inputs.tolerance(dtype)
            expected = reference.silu_and_mul(expected @ up.double().T + (up_bias.double() if bias else 0.0))
            assert paged_inputs.relative_error(gated(normed), expected) < paged_inputs.tolerance(dtype)


@pytest.mark.parametrize(("dtype", "vocab_size"), [(F32, 128256), (BF16, 151936), (F32, 49152)])
def test_sampling(dtype: torch.dtype, vocab_size: int) -> None:
    sampling_checks.check_sampling(CUDA, dtype, vocab_size, 1024, seed=11)
    sampling_checks.check_penalties(CUDA)


@pytest.mark.parametrize(("dtype", "head_dim", "block_size"), [(BF16, 128, 16), (F32, 64, 32), (BF16, 80, 64)])
def test_kv_pack(dtype: torch.dtype, head_dim: int, block_size: int) -> None:
    triton_checks.check_kv_pack(CUDA, dtype, head_dim, block_size, (5, 1000))


def test_decode_in_a_replayed_graph() -> None:
    """The grid is fixed at capture; lengths and blocks change under it."""
    first = paged_inputs.Paged(LENGTHS, 8, 128, 16, BF16, CUDA)
    q = torch.randn(len(LENGTHS), 32, 128, device=CUDA, dtype=BF16)
    plan = DecodePlan(len(LENGTHS), 32, 8, 128, CUDA)
    lens, out = first.seq_lens.clone(), torch.empty_like(q)

    def step() -> None:
        plan.update(lens)
        paged_decode(q, first.kv, first.table, lens, 0.1, plan, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for shorter in (0, 1, 16, 300):
        first.seq_lens = (torch.tensor(LENGTHS, device=CUDA, dtype=torch.int32) - shorter).clamp(min=1)
        lens.copy_(first.seq_lens)
        out.fill_(paged_inputs.NAN)
        graph.replay()
        expected = first.expected(q, range(len(LENGTHS) + 1), 0.1, None)
        assert paged_inputs.relative_error(out, expected) < paged_inputs.tolerance(BF16)


def test_mixed_batch_through_the_backend() -> None:
    """Leading decodes and a prefill in one call, planned once for two layers."""
    lengths, queries = [900, 40, 333, 700], [1, 1, 100, 700]
    paged = paged_inputs.Paged(lengths, 8, 128, 16, BF16, CUDA)
    bounds = [0, 1, 2, 102, 802]
    cu = torch.tensor(bounds, dtype=torch.int32, device=CUDA)
    kernels = TritonKernels(max_requests=8)
    kernels.begin_step(num_decodes=2)
    for _ in range(2):
        q = torch.randn(bounds[-1], 32, 128, device=CUDA, dtype=BF16)
        out = kernels.paged_attention(q, paged.kv, paged.table, cu, paged.seq_lens, 0.1, max(queries))
        assert paged_inputs.relative_error(out, paged.expected(q, bounds, 0.1, None)) < paged_inputs.tolerance(BF16)
