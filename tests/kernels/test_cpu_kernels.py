"""Every CPU backend against the reference in float64, over shapes, dtypes, mixed batches and poisoned memory."""

from __future__ import annotations

import pytest
import torch

from engine.kernels import Kernels, load_kernels, reference

DTYPES = (torch.float32, torch.bfloat16)
# Relative to the size of the result: rounding of the output and, in bfloat16, of what is rounded on the way.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.2e-2}


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return load_kernels(request.param)


@pytest.fixture(autouse=True, params=[1, 3])
def num_threads(request: pytest.FixtureRequest, kernels: Kernels) -> None:
    kernels.set_num_threads(request.param)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(ours: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.shape == exact.shape
    error = (ours.double() - exact).abs().max()
    assert error <= TOLERANCE[dtype] * exact.abs().max(), f"error {error}, size {exact.abs().max()}"


class PagedCache:
    """A layer's cache in which every slot that no request owns is NaN: touching one shows."""

    def __init__(self, lens: list[int], kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> None:
        blocks_of = [-(-n // block_size) for n in lens]
        generator = torch.Generator().manual_seed(1)
        order = torch.randperm(sum(blocks_of) + 3, generator=generator).int()
        self.layer = torch.full((len(order), 2, kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        self.block_table = torch.zeros(len(lens), max(blocks_of), dtype=torch.int32)
        first = 0
        for row, (num_tokens, num_blocks) in enumerate(zip(lens, blocks_of, strict=True)):
            self.block_table[row, :num_blocks] = order[first : first + num_blocks]
            first += num_blocks
            for token in range(num_tokens):
                block = self.block_table[row, token // block_size]
                values = torch.randn(2, kv_heads, head_dim, generator=generator)
                self.layer[block, :, :, token % block_size] = values.to(dtype)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32)


def attend(
    kernels: Kernels, q_lens: list[int], lens: list[int], heads: tuple[int, int], head_dim: int, block_size: int,
    dtype: torch.dtype, window: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    cache = PagedCache(lens, heads[1], head_dim, block_size, dtype)
    tokens = sum(q_lens)
    # As the model calls it: the query is a slice of a wider row.
    q = random(tokens, heads[0] + 2 * heads[1], head_dim, dtype=dtype)[:, : heads[0]]
    cu_seqlens = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
    rest = (cache.block_table, cu_seqlens, cache.seq_lens, head_dim**-0.5, max(q_lens), window)
    exact = reference.paged_attention(q.double(), cache.layer.double(), *rest)
    return kernels.paged_attention(q, cache.layer, *rest), exact


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((9, 3), 64, 32), ((8, 8), 32, 16), ((4, 1), 128, 16), ((10, 2), 80, 48), ((3, 3), 256, 16), ((16, 1), 48, 64)],
)
@pytest.mark.parametrize("window", [None, 1, 20, 70])
def test_attention_of_a_mixed_batch(kernels, heads, head_dim, block_size, dtype, window) -> None:
    q_lens, lens = [1, 1, 1, 2, 5, 40, 70, 33], [1, 64, 131, 2, 70, 40, 200, 65]
    ours, exact = attend(kernels, q_lens, lens, heads, head_dim, block_size, dtype, window)
    assert_near(ours, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1500])
def test_attention_over_a_long_context(kernels, dtype, window) -> None:
    ours, exact = attend(kernels, [1, 1, 3], [1025, 2100, 2049], (6, 2), 64, 32, dtype, window)
    assert_near(ours, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_a_peak(kernels, dtype) -> None:
    """One key far above the others in score, met late: the running maximum jumps."""
    cache = PagedCache([300, 300], 1, 64, 32, dtype)
    q = random(101, 2, 64, dtype=dtype)
    for row in range(2):
        cache.layer[cache.block_table[row, 190 // 32], 0, 0, 190 % 32] = q[0, 0] * 4
    rest = (cache.block_table, torch.tensor([0, 1, 101]).int(), cache.seq_lens, 1.0, 100)
    exact = reference.paged_attention(q.double(), cache.layer.double(), *rest)
    assert_near(kernels.paged_attention(q, cache.layer, *rest), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 6, 7, 14, 15, 28, 29, 64, 131])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (48, 96), (960, 576), (16, 1000), (50, 64), (64, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(kernels, rows, outputs, inputs, bias, dtype) -> None:
    weight, x = random(outputs, inputs, dtype=dtype), random(rows, inputs, dtype=dtype, seed=1)
    b = random(outputs, dtype=dtype, seed=2) if bias else None
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert_near(kernels.linear(weight, b)(x), exact, dtype)
    logits = kernels.linear(weight, b, torch.float32)(x)
    assert logits.dtype == torch.float32
    assert_near(logits, exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 5, 13, 40])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 32), (48, 64), (24, 32), (64, 33)])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_linear(kernels, rows, outputs, inputs, bias, dtype) -> None:
    weight, x = random(2 * outputs, inputs, dtype=dtype), random(rows, inputs, dtype=dtype, seed=1)
    b = random(2 * outputs, dtype=dtype, seed=2) if bias else None
    gate_up = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert_near(kernels.gated_linear(weight, b)(x), reference.silu_and_mul(gate_up), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 32), (50, 64)])
@pytest.mark.parametrize("plain", [False, True])
def test_linear_add_norm(kernels, outputs, inputs, plain, dtype) -> None:
    weight, x = random(outputs, inputs, dtype=dtype), random(5, inputs, dtype=dtype, seed=1)
    residual, norm_weight = random(5, outputs, dtype=dtype, seed=2), random(outputs, dtype=dtype, seed=3)
    exact = residual.double() + x.double() @ weight.double().T
    normed, total = kernels.linear_add_norm(weight, None, norm_weight, 1e-5, plain=plain)(x, residual.clone())
    assert_near(total, exact, dtype)
    assert_near(normed, reference.rms_norm(exact, norm_weight.double(), 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_results_do_not_depend_on_the_rest_of_the_batch(dtype) -> None:
    native = load_kernels("native")
    native.set_num_threads(2)
    multiply = native.linear(random(192, 96, dtype=dtype), None)
    x = random(70, 96, dtype=dtype, seed=1)
    alone = torch.cat([multiply(row) for row in x.split(1)])
    for rows in (2, 6, 7, 16, 29, 70):
        assert torch.equal(torch.cat([multiply(part) for part in x.split(rows)]), alone)

    lens = [1, 63, 200, 1100]
    together, _ = attend(native, [1] * 4, lens, (9, 3), 64, 32, dtype)
    cache = PagedCache(lens, 3, 64, 32, dtype)
    q = random(4, 15, 64, dtype=dtype)[:, :9]
    for row in range(4):
        out = native.paged_attention(
            q[row : row + 1], cache.layer, cache.block_table[row : row + 1], torch.tensor([0, 1]).int(),
            cache.seq_lens[row : row + 1], 0.125, 1,
        )  # fmt: skip
        assert torch.equal(out[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 576), (3, 64), (200, 576), (5, 100)])
def test_norm(kernels, rows, width, dtype) -> None:
    x, residual = random(rows, width, dtype=dtype), random(rows, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    first = kernels.fused_add_rms_norm(x.clone(), None, weight, 1e-5)
    exact = reference.fused_add_rms_norm(x.double(), None, weight.double(), 1e-5)
    assert_near(first[0], exact[0], dtype)
    assert torch.equal(first[1], x)
    exact = reference.fused_add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    normed, stream = kernels.fused_add_rms_norm(x.clone(), residual.clone(), weight, 1e-5)
    assert_near(normed, exact[0], dtype)
    assert_near(stream, exact[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1536), (100, 112), (300, 512), (5, 72)])
def test_silu_and_mul(kernels, rows, width, dtype) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype) * 8
    gate_up[0, 0] = -120.0  # silu is 0 there, not NaN
    assert_near(kernels.silu_and_mul(gate_up), reference.silu_and_mul(gate_up.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [((9, 3), 64, 32), ((4, 4), 80, 16), ((2, 1), 20, 16)])
@pytest.mark.parametrize("tokens", [1, 130])
@pytest.mark.parametrize("norm", [False, True])
def test_rope_and_kv_write(kernels, heads, head_dim, block_size, tokens, norm, dtype) -> None:
    rows = random(tokens, heads[0] + 2 * heads[1], head_dim, dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 500, (tokens,), generator=generator)
    slots = torch.randperm(16 * block_size, generator=generator)[:tokens]
    angles = torch.outer(torch.arange(500.0), 0.5 ** torch.arange(head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    weights = [random(head_dim, dtype=dtype, seed=s) if norm else None for s in (4, 5)]
    layer = random(16, 2, heads[1], block_size, head_dim, dtype=dtype, seed=6)
    exact_layer = layer.double()
    exact = reference.rope_kv_write(
        *rows.double().tensor_split((heads[0], sum(heads)), 1), cos_sin.double(), positions, slots, exact_layer,
        *(None if w is None else w.double() for w in weights), 1e-6,
    )  # fmt: skip
    ours = kernels.rope_kv_write(
        *rows.tensor_split((heads[0], sum(heads)), 1), cos_sin, positions, slots, layer, *weights, 1e-6
    )
    assert_near(ours, exact, dtype)
    assert_near(layer, exact_layer, dtype)


def test_float16_takes_the_torch_kernels() -> None:
    native = load_kernels("native")
    ours, exact = attend(native, [1, 9], [30, 40], (4, 2), 64, 16, torch.float16)
    assert (ours.double() - exact).abs().max() < 2e-3
    weight, x = random(64, 32, dtype=torch.float16), random(3, 32, dtype=torch.float16)
    assert (native.linear(weight, None)(x).double() - x.double() @ weight.double().T).abs().max() < 2e-2
