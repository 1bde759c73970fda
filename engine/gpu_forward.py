"""The model's forward pass over packed steps on a CUDA device: eager, or from graphs.

Owns the static buffers (inputs, block tables, last tokens, hidden states) and the graphs over them; not the weights,
the KV cache or the sampling. Made and called by the GPU runner. Four ways, by what a step holds:

    decode    only decodes               one graph of the next larger batch size, with or without cascade
    prompts   few tokens, of few prompts one graph of the next larger token count
    pieces    few other tokens           graphs between attention calls, of the next larger token count
    eager     more tokens                exact sizes; the device takes longer than launching

Where KV leaves before the step is over, ``after_layer`` is called when what writes a layer's KV is launched: between
pieces, for the layers of a group of prompts' graphs, or for all layers after a graph of decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.batch import ForwardBatch, ScheduledBatch
from engine.cuda_graphs import AfterLayer, CapturedForward, decode_buckets, token_buckets
from engine.gpu_batch import Ints, PackedStep, RequestSlots, StepLayout
from engine.kernels.cascade_attention import CascadePlan
from engine.kernels.cascade_plan import CascadeCost, SharedRange, choose_groups, find_groups
from engine.kernels.step_inputs import prepare, update_table
from engine.kernels.triton_gpu import TritonKernels
from engine.launch_cost import LaunchCost
from engine.model_config import ModelConfig
from engine.models import CausalLM

_MOST_PROMPTS = 32
"""Requests of a graph of prompts: their attention has so many, the last ones empty. It is another kernel for more."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """How a step runs, and where its inputs lie."""

    kind: str
    """decode | prompts | pieces | eager"""
    layout: StepLayout
    inputs: dict[str, torch.Tensor]


class GpuForward:
    def __init__(
        self,
        model: CausalLM,
        kernels: TritonKernels,
        config: ModelConfig,
        slots: RequestSlots,
        *,
        max_tokens: int,
        kv_layers: list[torch.Tensor],
        layer_group_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        layers = range(len(kv_layers))
        self._groups = [layers[at : at + layer_group_size] for at in layers[::layer_group_size]]
        self._model, self._kernels, self._kv_layers, self._slots = model, kernels, kv_layers, slots
        self._max_rows = slots.num_slots
        self._most_prompts = min(_MOST_PROMPTS, self._max_rows)
        self._decode_sizes = decode_buckets(self._max_rows)
        self._launch_cost = LaunchCost(config)
        self._token_sizes = token_buckets(min(self._launch_cost.max_tokens, max_tokens))
        words = max(StepLayout(max_tokens, self._max_rows).words, StepLayout(self._max_rows, self._max_rows).words)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._block = ints(words)
        self._table = ints(*slots.table.shape)
        self._step_table = ints(self._max_rows, slots.max_blocks)
        self.last_tokens = ints(slots.num_slots + 1)
        static_tokens = max(self._max_rows, *self._token_sizes, 1)
        heads = (static_tokens, config.num_heads, config.head_dim)
        self._hidden = torch.zeros(static_tokens, config.hidden_size, dtype=dtype, device=device)
        self._queries = torch.zeros(heads, dtype=dtype, device=device)
        self._mixed = torch.zeros(heads, dtype=dtype, device=device)
        self._shapes: dict[tuple[int, int], tuple[StepLayout, dict[str, torch.Tensor]]] = {}
        self._graphs: dict[tuple[str, int, bool], CapturedForward] = {}
        self._pool = torch.cuda.graph_pool_handle()
        cost = CascadeCost(num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim)
        power_of_two = (config.num_heads // config.num_kv_heads).bit_count() == 1
        can_share = dtype.itemsize == 2 and power_of_two and None in config.windows
        self._cascade = CascadePlan(self._max_rows, cost, device) if can_share else None
        self._grouped = np.zeros(0, np.int64)

    @property
    def padded_rows(self) -> list[int]:
        """Of steps with prompt tokens; see ``AsyncRunner``."""
        return self._token_sizes

    @property
    def block_words(self) -> int:
        return int(self._block.numel())

    def shape_of(self, batch: ScheduledBatch) -> StepShape:
        requests, tokens = len(batch.items), batch.num_tokens
        if tokens == requests:
            return self.decode_shape(requests)
        larger = [size for size in self._token_sizes if size >= tokens]
        if not larger or not self._launch_cost.may_exceed(tokens, batch.load().prefill_pairs):
            return self._eager(requests, tokens)
        has_decodes = batch.items[0].num_tokens == 1  # they come first
        kind = "pieces" if has_decodes or requests > self._most_prompts else "prompts"
        return StepShape(kind, *self._static(larger[0], self._max_rows))

    def decode_shape(self, requests: int) -> StepShape:
        rows = self._decode_size(requests)
        return StepShape("decode", *self._static(rows, rows))

    def _eager(self, num_requests: int, num_tokens: int) -> StepShape:
        layout = StepLayout(num_tokens, self._decode_size(num_requests))
        return StepShape("eager", layout, self._views(layout))

    def run(
        self, shape: StepShape, step: PackedStep, block: torch.Tensor, after_layer: AfterLayer | None = None
    ) -> torch.Tensor:
        """Hidden states of the rows that draw a token, then padding. ``block`` is pinned."""
        self._block[: shape.layout.words].copy_(block[: shape.layout.words], non_blocking=True)
        self._apply_changes()
        cascade = self._choose_cascade(step)
        if shape.kind == "decode":
            self._run_decodes(shape, cascade, after_layer)
            if len(step.sampled) == step.num_requests:
                return self._hidden[: shape.layout.rows]
            return self._hidden.index_select(0, self._drawn_rows(shape, step))
        if shape.kind == "prompts":
            self._run_prompts(shape, after_layer)
            return self._finish_drawn(shape, self._drawn_rows(shape, step))
        num_requests = step.num_requests
        batch = self._batch(shape, num_requests, step.max_q_len, len(step.sampled))
        self._kernels.begin_step(step.num_decodes, cascade, is_mixed=True)
        if shape.kind == "pieces":
            self._run_pieces(shape, batch, after_layer)
            return self._finish_drawn(shape, self._drawn_rows(shape, step))
        self._prepare(shape)
        mixed, residual = self._model.attend(batch, self._kv_layers, after_layer, narrow=True)
        return self._finish(mixed, residual)

    def capture_all(self) -> int:
        """Capture every graph that a step without shared prefixes can use; how many there are. Largest first."""
        for rows in reversed(self._decode_sizes):
            shape = StepShape("decode", *self._static(rows, rows))
            self._blank(shape, 0)
            self._run_decodes(shape, None)
            self._model.logits(self._hidden[:rows])
        for tokens in reversed(self._token_sizes):
            shape = StepShape("pieces", *self._static(tokens, self._max_rows))
            requests, longest = self._blank(shape, tokens)
            self._kernels.begin_step(0)
            self._run_pieces(shape, self._batch(shape, requests, longest, 1))
            self._run_prompts(shape)
            self._finish_drawn(shape, shape.inputs["logits_index"][:1])
        return len(self._graphs)

    def run_blank(self, num_tokens: int, num_requests: int = 1, cascade: CascadePlan | None = None) -> None:
        """An eager pass that writes no KV: to see what it needs, and to compile. At least that many requests."""
        shape = self._eager(self._max_rows, num_tokens)
        requests, longest = self._blank(shape, num_tokens, num_requests)
        is_mixed = longest > 1
        self._kernels.begin_step(0, cascade, is_mixed=is_mixed)
        self._prepare(shape)
        batch = self._batch(shape, requests, longest, requests)
        self._model.forward(batch, self._kv_layers)
        if is_mixed:  # as the last layer of such a step does it
            self._finish(*self._model.attend(batch, self._kv_layers, narrow=True))

    def rehearse(self) -> None:
        """Launch whatever steps that run from graphs launch; for ``compile_ahead``, where nothing runs. Kernels differ
        by powers of two of the rows, from 16 on: one size of each will do.
        """
        for rows in _kinds(self._decode_sizes):
            self.run_blank(rows, rows)
        for tokens in _kinds(self._token_sizes):
            self.run_blank(tokens)
        if self._cascade is not None:
            for rows in _kinds([size for size in self._decode_sizes if size > 1]):
                self.run_blank(rows, rows, self._shared_by_two(self._cascade, rows))
        change = torch.zeros(2, 1, dtype=torch.int32, device=self._table.device)
        update_table(self._table, change[0], change[1])

    def _shared_by_two(self, plan: CascadePlan, rows: int) -> CascadePlan:
        """As if the first two of the rows had their first block in common."""
        size = self._slots.block_size
        lengths = np.zeros(rows, np.int32)
        lengths[:2] = 2 * size
        plan.regroup(np.zeros((2, 2), np.int32), lengths, size, [SharedRange(np.arange(2), 0, size)])
        return plan

    # --- graphs ---

    def _run_decodes(
        self, shape: StepShape, cascade: CascadePlan | None, after_layer: AfterLayer | None = None
    ) -> None:
        rows = shape.layout.rows

        def forward(after_layer: AfterLayer | None) -> None:
            batch = self._batch(shape, rows, 1, rows)
            self._kernels.begin_step(rows, cascade)
            self._prepare(shape)
            self._hidden[:rows].copy_(self._model.forward(batch, self._kv_layers, after_layer))

        self._replay(("decode", rows, cascade is not None), forward, [range(len(self._kv_layers))], after_layer)

    def _run_prompts(self, shape: StepShape, after_layer: AfterLayer | None = None) -> None:
        """Up to the last layer's attention."""
        tokens = shape.layout.tokens

        def forward(after_layer: AfterLayer | None) -> None:
            batch = self._batch(shape, self._most_prompts, tokens, 0)
            self._kernels.begin_step(0)
            self._prepare(shape)
            mixed, residual = self._model.attend(batch, self._kv_layers, after_layer)
            self._mixed[:tokens].flatten(1).copy_(mixed)
            self._hidden[:tokens].copy_(residual)

        self._replay(("prompts", tokens, False), forward, self._groups, after_layer)

    def _replay(
        self,
        key: tuple[str, int, bool],
        forward: Callable[[AfterLayer | None], None],
        groups: Sequence[Sequence[int]],
        after_layer: AfterLayer | None,
    ) -> None:
        """The graph of that key; the first time its kernels one by one, and then the capture."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay(after_layer)
            return
        forward(after_layer)
        self._graphs[key] = CapturedForward(forward, self._pool, groups)

    def _run_pieces(self, shape: StepShape, batch: ForwardBatch, after_layer: AfterLayer | None = None) -> None:
        tokens = shape.layout.tokens
        key = ("pieces", tokens, False)
        graph = self._graphs.get(key)
        queries, mixed = self._queries[:tokens], self._mixed[:tokens]
        if graph is None:

            def forward(after_layer: AfterLayer | None = None) -> None:
                self._prepare(shape)
                attended, residual = self._model.attend(batch, self._kv_layers, after_layer)
                if attended.data_ptr() != mixed.data_ptr():  # the run before the capture
                    mixed.copy_(attended.view_as(mixed))
                self._hidden[:tokens].copy_(residual)

            forward(after_layer)
            self._graphs[key] = CapturedForward.in_pieces(forward, self._pool, self._kernels, queries, mixed)
        else:

            def attend(kv_layer: torch.Tensor, scale: float, window: int | None) -> None:
                self._kernels.attend(
                    queries, kv_layer, batch.block_table, batch.cu_seqlens_q, batch.seq_lens, scale, batch.max_q_len,
                    window, mixed,
                )  # fmt: skip

            graph.replay(after_layer, attend)

    def _finish_drawn(self, shape: StepShape, drawn: torch.Tensor) -> torch.Tensor:
        """What the graphs of that shape have left of the rows that a token is drawn from."""
        if not len(drawn):
            return self._hidden[:0]
        mixed = self._mixed[: shape.layout.tokens].flatten(1)
        return self._model.finish(mixed.index_select(0, drawn), self._hidden.index_select(0, drawn))

    def _finish(self, mixed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What is left of an eager step, for the rows that a token is drawn from, and padding (of an older step)."""
        rows = len(residual)
        if not rows:
            return residual
        padded = self._decode_size(rows)
        static = self._mixed[:padded].flatten(1)
        static[:rows].copy_(mixed)
        self._hidden[:rows].copy_(residual)
        return self._model.finish(static, self._hidden[:padded])

    def _decode_size(self, rows: int) -> int:
        """The next larger batch size of decodes. The library chooses a kernel for each number of rows and loads it
        when it is new, which waits for the device; these were seen at start."""
        return next(size for size in self._decode_sizes if size >= rows)

    def _drawn_rows(self, shape: StepShape, step: PackedStep) -> torch.Tensor:
        """Where the rows are that a token is drawn from; the padding is row 0's."""
        count = len(step.sampled)
        return shape.inputs["logits_index"][: self._decode_size(count) if count else 0]

    # --- inputs ---

    def _static(self, tokens: int, rows: int) -> tuple[StepLayout, dict[str, torch.Tensor]]:
        found = self._shapes.get((tokens, rows))
        if found is None:
            layout = StepLayout(tokens, rows)
            found = self._shapes[tokens, rows] = (layout, self._views(layout))
        return found

    def _views(self, layout: StepLayout) -> dict[str, torch.Tensor]:
        return {name: self._block[where] for name, where in layout.fields.items()}

    def _batch(self, shape: StepShape, requests: int, max_q_len: int, sampled: int) -> ForwardBatch:
        inputs = shape.inputs
        return ForwardBatch(
            token_ids=inputs["token_ids"],
            positions=inputs["positions"],
            slot_mapping=inputs["slot_mapping"],
            cu_seqlens_q=inputs["cu_seqlens_q"][: requests + 1],
            seq_lens=inputs["seq_lens"][:requests],
            block_table=self._step_table[:requests],
            logits_index=inputs["logits_index"][:sampled],
            max_q_len=max_q_len,
        )

    def _prepare(self, shape: StepShape) -> None:
        inputs = shape.inputs
        prepare(
            inputs["token_ids"], inputs["slots"], inputs["seq_lens"], self.last_tokens, self._table, self._step_table,
            self._slots.block_size,
        )  # fmt: skip

    def _apply_changes(self) -> None:
        at, ids = self._slots.take_changes()
        if at:
            host = torch.from_numpy(np.array([at, ids], np.int32)).pin_memory()
            changes = host.to(self._table.device, non_blocking=True)
            update_table(self._table, changes[0], changes[1])

    def _blank(self, shape: StepShape, num_tokens: int, num_requests: int = 1) -> tuple[int, int]:
        """Inputs of requests that have no KV: ``num_requests``, or as few as can have ``num_tokens`` if those are more.

        Returns:
            Their number, and the tokens of the longest.
        """
        layout = shape.layout
        block: Ints = np.zeros(layout.words, np.int32)
        out = layout.arrays(block)
        out["slots"][:] = self._slots.num_slots
        out["sample_slots"][:] = self._slots.num_slots
        out["slot_mapping"][:] = -1
        longest = min(-(-num_tokens // num_requests), (self._slots.max_blocks - 1) * self._slots.block_size)
        rows = max(1, min(layout.rows, -(-num_tokens // max(longest, 1))))
        ends = np.minimum(np.arange(1, layout.rows + 1) * longest, num_tokens)
        ends[rows:] = ends[rows - 1]
        out["cu_seqlens_q"][1:] = ends
        out["seq_lens"][:] = np.diff(ends, prepend=0)
        self._block[: layout.words].copy_(torch.from_numpy(block))
        return rows, longest

    # --- shared prefixes ---

    def _choose_cascade(self, step: PackedStep) -> CascadePlan | None:
        """The plan of this step's decodes, if sharing pays. Regrouped only when they are others than before."""
        plan, count = self._cascade, step.num_decodes
        if plan is None or count < 2:
            return None
        slots = step.slots[:count]
        stamps = self._slots.stamp[slots]
        if not np.array_equal(stamps, self._grouped):
            self._grouped = stamps
            seq_lens = step.seq_lens[:count].astype(np.int32)
            size = self._slots.block_size
            table = self._slots.table[slots, : -(-int(seq_lens.max()) // size)]
            ranges = choose_groups(find_groups(table, seq_lens, size), size, plan.cost)
            if ranges or plan.prefix is not None:
                # Padding has no shared range either.
                padded = np.zeros(self._decode_size(count), np.int32)
                padded[:count] = seq_lens
                plan.regroup(table, padded, size, ranges)
        return plan if plan.prefix is not None else None


def _kinds(sizes: list[int]) -> list[int]:
    """The largest size up to 16, from there to 32, and so on."""
    return list({max(size - 1, 15).bit_length(): size for size in sizes}.values())
