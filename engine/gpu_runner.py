"""Runs steps on a CUDA device, one ahead of the host.

Owns the model, its weights, the KV cache's memory and the order of things on the device's stream; measures at start how
many blocks fit. The same ``Runner`` as ``ModelRunner``, plus ``launch``: a step's tokens stay on the device, where the
next step reads them, and reach the host by a side stream. Called by the engine core, from its one thread.

    host    pack n+1 | launch n+1 | read n | update n | pack n+2 ...
    device  ..... forward n, draw n | forward n+1, draw n+1 | ...
    side              ... tokens n to the host ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
import torch

from engine.batch import SampledBatch, ScheduledBatch
from engine.config import EngineConfig
from engine.dummy_weights import open_weights
from engine.gpu_batch import PackedStep, RequestSlots, pack_step
from engine.gpu_forward import GpuForward, StepShape
from engine.gpu_sampler import DrawnLogprobs, GpuSampler, draw_params
from engine.kernels.launch import compile_ahead
from engine.kernels.sampling import penalise
from engine.kernels.step_inputs import commit
from engine.kernels.triton_gpu import TritonKernels
from engine.kv_cache import KVCache
from engine.messages import TokenLogprobs
from engine.model_config import ModelConfig, load_model_config
from engine.model_runner import OnLayers, longest_request
from engine.models import CausalLM, build_model
from engine.weights import resolve_model

log = structlog.get_logger()

_RING = 3
"""Steps whose host memory is in use: two launched and not read, one being packed."""
_SPARE_BYTES = 3 << 29
"""Of an engine's part, for what is not measured: the driver's context, graphs' own records, small stagings."""


@dataclass(slots=True)
class _Ring:
    """Host memory of one step, pinned, and where its tokens wait for the copy."""

    block: torch.Tensor
    tokens: torch.Tensor
    tokens_on_device: torch.Tensor
    done: torch.cuda.Event


@dataclass(slots=True)
class GpuStep:
    """A launched step; see ``PendingStep``."""

    num_items: int
    sampled: list[int]
    ring: _Ring
    logprobs: DrawnLogprobs | None
    held: DrawnLogprobs | None
    """Device memory that is still being copied."""

    def is_done(self) -> bool:
        return bool(self.ring.done.query())  # type: ignore[no-untyped-call]

    def result(self) -> SampledBatch:
        self.ring.done.synchronize()
        token_ids: list[int | None] = [None] * self.num_items
        logprobs: list[TokenLogprobs | None] = [None] * self.num_items
        for item, token_id in zip(self.sampled, self.ring.tokens[: len(self.sampled)].tolist(), strict=True):
            token_ids[item] = token_id
        if self.logprobs is not None:
            for row, found in self.logprobs.read().items():
                logprobs[self.sampled[row]] = found
        return SampledBatch(token_ids, logprobs)


class GpuRunner:
    """One model on one device."""

    def __init__(self, config: EngineConfig) -> None:
        """Load, measure, allocate, capture."""
        started_s = time.monotonic()
        self.config = config
        asked = torch.device(config.device)
        self.device = torch.device("cuda", torch.cuda.current_device() if asked.index is None else asked.index)
        torch.cuda.set_device(self.device)
        # Graphs are not captured on the default stream; all of the engine's work is on this one, in order.
        torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]
        self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        directory = resolve_model(config.model)
        self.model_config: ModelConfig = load_model_config(directory)
        self.dtype = getattr(torch, self.model_config.dtype if config.dtype == "auto" else config.dtype)
        self.max_model_len = longest_request(config, self.model_config)
        self.eos_token_ids = list(self.model_config.eos_token_ids)
        self.vocab_size = self.model_config.vocab_size

        max_rows = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._slots = RequestSlots(max_rows, self.max_model_len // config.block_size + 1, config.block_size)
        self._kernels = TritonKernels(max_requests=max_rows)
        source, self.model_fingerprint = open_weights(config, directory, self.model_config, self.dtype, self.device)
        with source as weights, torch.inference_mode():
            self._model = build_model(self.model_config, weights, self._kernels, self.max_model_len)
        loaded_s = time.monotonic()
        with torch.inference_mode():
            self._sampler = GpuSampler(max_rows, self.eos_token_ids, self.device)
            self._compile_ahead(max_rows)
            compiled_s = time.monotonic()
            self.num_blocks = config.num_blocks or self._measure_blocks(max_rows)
        # An ordinary tensor: hand-offs and preemption write to it outside of inference mode.
        self.kv_cache = self._make_cache(self.num_blocks)
        with torch.inference_mode():
            self._forward = self._make_forward(self.kv_cache, self._model)
            measured_s = time.monotonic()
            self._rings = [self._make_ring(max_rows) for _ in range(_RING)]
            self._next_ring = 0
            num_graphs = self._forward.capture_all()
            self._run_prefills(self._forward, max_rows)
            self._warm_sampler(self._forward, max_rows)
            torch.cuda.synchronize()
        log.info(
            "model_loaded",
            model=config.model,
            architecture=self.model_config.architecture,
            dtype=str(self.dtype).removeprefix("torch."),
            kernels=self._kernels.name,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            kv_bytes=self.kv_cache.num_bytes,
            max_model_len=self.max_model_len,
            graphs=num_graphs,
            weights_s=round(loaded_s - started_s, 2),
            compile_s=round(compiled_s - loaded_s, 2),
            measure_s=round(measured_s - compiled_s, 2),
            graphs_s=round(time.monotonic() - measured_s, 2),
        )

    @property
    def padded_rows(self) -> list[int]:
        """See ``engine.runner.AsyncRunner``."""
        return self._forward.padded_rows

    def run(self, batch: ScheduledBatch, on_layers: OnLayers | None = None) -> SampledBatch:
        return self.launch(batch, on_layers).result()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch, on_layers: OnLayers | None = None) -> GpuStep:
        """Start the step; see ``engine.core.AsyncRunner``. ``on_layers`` is called as layers are launched: what it
        then does on this stream finds their KV written."""
        ring = self._rings[self._next_ring]
        self._next_ring = (self._next_ring + 1) % _RING
        shape = self._forward.shape_of(batch)
        step = pack_step(batch, self._slots, shape.layout, ring.block.numpy())
        after_layer = None if on_layers is None else self._grouped(on_layers)
        hidden = self._forward.run(shape, step, ring.block, after_layer)
        logprobs = self._draw(batch, shape, step, hidden, ring) if step.sampled else None
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            count = len(step.sampled)
            ring.tokens[:count].copy_(ring.tokens_on_device[:count], non_blocking=True)
            on_host = None if logprobs is None else logprobs.to_host()
            ring.done.record()
        return GpuStep(len(batch.items), step.sampled, ring, on_host, logprobs)

    def _draw(
        self, batch: ScheduledBatch, shape: StepShape, step: PackedStep, hidden: torch.Tensor, ring: _Ring
    ) -> DrawnLogprobs | None:
        logits = self._model.logits(hidden)
        rows = logits.shape[0]
        items = [batch.items[index] for index in step.sampled]
        if step.special:
            self._sampler.process(logits, items, step.special)
        tokens = self._sampler.draw(logits, None if step.greedy else draw_params(shape.inputs, rows), step.cut)
        commit(tokens, shape.inputs["sample_slots"][:rows], self._forward.last_tokens, ring.tokens_on_device)
        return self._sampler.logprobs(logits, tokens, items, step.special) if step.special else None

    def _grouped(self, on_layers: OnLayers) -> Callable[[int], None]:
        size, num_layers = self.config.layer_group_size, self.model_config.num_layers

        def after_layer(layer: int) -> None:
            end = layer + 1
            if end % size == 0 or end == num_layers:
                on_layers((layer // size) * size, end)

        return after_layer

    # --- at start ---

    def _make_cache(self, num_blocks: int) -> KVCache:
        return KVCache(
            num_layers=self.model_config.num_layers,
            num_blocks=num_blocks,
            num_kv_heads=self.model_config.num_kv_heads,
            block_size=self.config.block_size,
            head_dim=self.model_config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def _make_forward(self, cache: KVCache, model: CausalLM) -> GpuForward:
        return GpuForward(
            model,
            self._kernels,
            self.model_config,
            self._slots,
            max_tokens=self.config.max_num_batched_tokens,
            kv_layers=cache.layers,
            layer_group_size=self.config.layer_group_size,
            dtype=self.dtype,
            device=self.device,
        )

    def _make_ring(self, max_rows: int) -> _Ring:
        words = self._forward.block_words
        return _Ring(
            torch.zeros(words, dtype=torch.int32, pin_memory=True),
            torch.zeros(max_rows, dtype=torch.int32, pin_memory=True),
            torch.zeros(max_rows, dtype=torch.int32, device=self.device),
            torch.cuda.Event(),  # type: ignore[no-untyped-call]
        )

    def _measure_blocks(self, max_rows: int) -> int:
        """Run the largest step over a cache of two blocks; what it leaves of the engine's part is the pool's.

        Other engines on the device may be starting at this moment, so what is free now says little: the parts of all
        of them must add up to at most the whole.
        """
        config, model = self.config, self.model_config
        torch.cuda.reset_peak_memory_stats(self.device)
        forward = self._make_forward(self._make_cache(2), self._model)
        forward.run_blank(config.max_num_batched_tokens)
        self._model.logits(torch.zeros(max_rows, model.hidden_size, dtype=self.dtype, device=self.device))
        graph_tokens = max(forward.padded_rows, default=0)
        del forward
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.device)
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        work_bytes = peak_bytes - torch.cuda.memory_allocated(self.device)
        block_bytes = KVCache.bytes_per_block(
            model.num_layers, model.num_kv_heads, config.block_size, model.head_dim, self.dtype
        )
        step_bytes = config.max_num_batched_tokens * block_bytes // config.block_size
        # Graphs keep what their largest step works in beside what is left to eager ones.
        graph_bytes = work_bytes * graph_tokens // config.max_num_batched_tokens
        spare_bytes = _SPARE_BYTES + graph_bytes + config.staged_steps * step_bytes
        room_bytes = int(total_bytes * config.gpu_memory_utilization) - peak_bytes - spare_bytes
        if config.kv_cache_bytes is not None:
            room_bytes = config.kv_cache_bytes
        num_blocks = min(room_bytes // block_bytes, max_rows * self._slots.max_blocks)
        if num_blocks < 2:
            raise ValueError(
                f"gpu_memory_utilization={config.gpu_memory_utilization}: weights, activations and the driver take "
                f"{(peak_bytes + spare_bytes) >> 20} MiB of {total_bytes >> 20} and leave no room for KV: use a "
                "higher --gpu-memory-utilization or a smaller --max-num-batched-tokens"
            )
        if num_blocks * block_bytes + work_bytes > free_bytes:
            raise ValueError(
                f"the KV pool would take {num_blocks * block_bytes >> 20} MiB and a step {work_bytes >> 20}, but only "
                f"{free_bytes >> 20} of {total_bytes >> 20} MiB are free: lower --gpu-memory-utilization, now "
                f"{config.gpu_memory_utilization}, or end what else uses the device"
            )
        return num_blocks

    def _compile_ahead(self, max_rows: int) -> None:
        """All kernels at once, with the rest of the start as a rehearsal; those that take longest come first."""
        forward = self._make_forward(self._make_cache(2), self._model.excerpt())
        try:
            with compile_ahead():
                self._warm_sampler(forward, max_rows)
                self._run_prefills(forward, max_rows)
                forward.run_blank(self.config.max_num_batched_tokens)
                forward.rehearse()
        except Exception:
            # What is not compiled now is compiled when it is launched; what is really wrong is said there.
            log.warning("kernels_not_compiled_ahead", exc_info=True)

    def _run_prefills(self, forward: GpuForward, max_rows: int) -> None:
        """Of many prompts: attention is another kernel for each power of two of them from 32 on."""
        most = min(max_rows, self.config.max_num_batched_tokens // 2)
        prompts = 32
        while prompts < most:
            prompts = min(2 * prompts, most)
            forward.run_blank(2 * prompts, prompts)

    def _warm_sampler(self, forward: GpuForward, max_rows: int) -> None:
        """Compile the last product, and what a step can need to draw from its logits."""
        hidden = torch.zeros(max_rows, self.model_config.hidden_size, dtype=self.dtype, device=self.device)
        padding = torch.full((max_rows,), self._slots.num_slots, dtype=torch.int32, device=self.device)
        drawn = torch.zeros_like(padding)
        for rows in (*(1 << power for power in range(max_rows.bit_length())), max_rows):
            shape = forward.decode_shape(rows)
            params = draw_params(shape.inputs, rows)
            logits = self._model.logits(hidden[:rows])
            for given, cut in ((None, False), (params, False), (params, True)):
                tokens = self._sampler.draw(logits, given, cut)
            commit(tokens, padding[:rows], forward.last_tokens, drawn)
        entry, factor = torch.zeros_like(drawn[:1]), torch.zeros(1, device=self.device)
        penalise(logits[:1], entry, entry, entry, entry, factor, factor, factor, factor)
