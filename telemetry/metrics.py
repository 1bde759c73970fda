"""The names of all metrics, in one place. ``vllm:`` names where the meaning is vLLM's, ``pdserve_`` for the rest.

Each class takes the CollectorRegistry that it reports to: nothing registers itself globally. Counters that an engine
owns are mirrored from its last statistics, so they cannot drift from what the engine counted; a restart of the engine
sets them back to 0, as Prometheus expects of counters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
LATENCY_BUCKETS_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 600)
PHASE_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BYTES_BUCKETS = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26, 1 << 28, 1 << 30, 1 << 32, 1 << 34)
GBPS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTH_BUCKETS_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)

PHASES = (
    "tokenize", "route", "prefill_queue", "prefill", "handoff_wait", "transfer", "relay", "rest"
)  # fmt: skip
"""The parts of the time to the first token; they add up to it."""


class EngineStatsLike(Protocol):
    """What an engine reports; engine.messages.EngineStats is one."""

    running: int
    waiting: int
    waiting_for_kv: int
    holding_kv: int
    queued_tokens: int
    shares_prefill: bool
    prefill_tokens_per_s: float
    itl_aim_s: float
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    host_blocks: int
    total_host_blocks: int
    steps_total: int
    mixed_steps_total: int
    mixed_steps_over_budget_total: int
    max_batch_requests: int
    prompt_tokens_total: int
    generation_tokens_total: int
    prefill_chunks_total: int
    preemptions_total: int
    offloaded_blocks_total: int
    offloaded_bytes_total: int
    restored_blocks_total: int
    prefix_cache_queries_total: int
    prefix_cache_hits_total: int
    reservations_taken_over_total: int
    transfers_started_total: int
    transfers_done_total: int
    transfers_failed_total: dict[str, int]
    transfer_segments_total: int
    transfer_bytes_total: int
    transfer_seconds_total: float
    staging_bytes: int
    staging_limit_bytes: int
    leases: int
    tombstones: int
    parked_handoffs: int
    segments_before_last_chunk_total: int


# metric name, attribute, help. Counters get their ``_total`` from the client library.
_ENGINE_GAUGES = (
    ("vllm:num_requests_running", "running", "Requests in the batch"),
    ("vllm:num_requests_waiting", "waiting", "Requests waiting to be scheduled"),
    ("pdserve_requests_waiting_for_kv", "waiting_for_kv", "Decode: requests whose KV has not arrived"),
    ("pdserve_requests_holding_kv", "holding_kv", "Prefill: computed requests whose hand-off has not ended"),
    ("pdserve_queued_tokens", "queued_tokens", "Prompt tokens not yet computed"),
    ("pdserve_shares_prefill", "shares_prefill", "1: it may compute prompts while prefill workers are busy"),
    (
        "pdserve_shared_prefill_tokens_per_second",
        "prefill_tokens_per_s",
        "Prompt tokens that it computes within its ITL budget, beside what decodes; 0: not known yet",
    ),
    (
        "pdserve_itl_aim_seconds",
        "itl_aim_s",
        "With an ITL budget: so long steps with decodes and prompt tokens are to take",
    ),
    ("pdserve_max_batch_requests", "max_batch_requests", "Most requests that one step ever ran"),
    ("pdserve_staging_bytes", "staging_bytes", "Staging in use"),
    ("pdserve_staging_limit_bytes", "staging_limit_bytes", "Staging that may be used"),
    ("pdserve_leases", "leases", "Open reservations (decode) or holds (prefill)"),
    ("pdserve_tombstones", "tombstones", "Ended hand-offs whose late messages are refused"),
    ("pdserve_parked_handoffs", "parked_handoffs", "Hand-offs that wait for their request to arrive"),
)
_ENGINE_COUNTERS = (
    ("vllm:prompt_tokens", "prompt_tokens_total", "Prompt tokens of requests that were prefilled here"),
    ("vllm:generation_tokens", "generation_tokens_total", "Tokens generated"),
    ("vllm:num_preemptions", "preemptions_total", "Requests preempted"),
    ("pdserve_kv_offloaded_blocks", "offloaded_blocks_total", "KV blocks of preempted requests, to host memory"),
    ("pdserve_kv_offloaded_bytes", "offloaded_bytes_total", "Their bytes"),
    ("pdserve_kv_restored_blocks", "restored_blocks_total", "KV blocks of preempted requests, back from host memory"),
    ("vllm:prefix_cache_queries", "prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache"),
    ("vllm:prefix_cache_hits", "prefix_cache_hits_total", "Prompt tokens found in the prefix cache"),
    ("pdserve_steps", "steps_total", "Steps run"),
    ("pdserve_mixed_steps", "mixed_steps_total", "With an ITL budget: steps with decodes and prompt tokens"),
    ("pdserve_mixed_steps_over_budget", "mixed_steps_over_budget_total", "Those that took longer than the budget"),
    ("pdserve_prefill_chunks", "prefill_chunks_total", "Prompt chunks computed"),
    (
        "pdserve_reservations_taken_over",
        "reservations_taken_over_total",
        "Decode: attempts that went on with the blocks reserved for the attempt before",
    ),
    ("pdserve_transfers_started", "transfers_started_total", "KV transfers started"),
    ("pdserve_transfers_done", "transfers_done_total", "KV transfers verified and published"),
    ("pdserve_transfer_segments", "transfer_segments_total", "KV segments moved"),
    ("pdserve_transfer_bytes", "transfer_bytes_total", "KV bytes moved"),
    ("pdserve_transfer_seconds", "transfer_seconds_total", "Time spent moving KV"),
    (
        "pdserve_segments_before_last_chunk",
        "segments_before_last_chunk_total",
        "Decode: transfers whose first segment arrived before the prefill ended",
    ),
)


class EngineMetrics(Collector):
    """Mirrors the last statistics of a worker's engine. ``update`` is called with each message that has them."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._stats: EngineStatsLike | None = None
        registry.register(self)

    def update(self, stats: EngineStatsLike) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        if stats is None:
            return
        for name, attribute, text in _ENGINE_GAUGES:
            yield self._gauge(name, text, getattr(stats, attribute))
        for name, attribute, text in _ENGINE_COUNTERS:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model_name], getattr(stats, attribute))
            yield counter
        unused = stats.free_blocks + stats.cached_blocks
        usage = 1 - unused / stats.total_blocks if stats.total_blocks else 0.0
        yield self._gauge("vllm:kv_cache_usage_perc", "Blocks in use; 1 is all of them", usage)
        blocks = GaugeMetricFamily("pdserve_kv_blocks", "KV blocks by state", labels=["model_name", "state"])
        blocks.add_metric([self._model_name, "free"], stats.free_blocks)
        blocks.add_metric([self._model_name, "cached"], stats.cached_blocks)
        blocks.add_metric([self._model_name, "used"], stats.total_blocks - unused)
        blocks.add_metric([self._model_name, "total"], stats.total_blocks)
        yield blocks
        host = GaugeMetricFamily(
            "pdserve_host_kv_blocks", "Blocks of host memory for preempted requests", labels=["model_name", "state"]
        )
        host.add_metric([self._model_name, "used"], stats.host_blocks)
        host.add_metric([self._model_name, "total"], stats.total_host_blocks)
        yield host
        failed = CounterMetricFamily(
            "pdserve_transfers_failed", "KV transfers that failed", labels=["model_name", "reason"]
        )
        for reason, count in sorted(stats.transfers_failed_total.items()):
            failed.add_metric([self._model_name, reason], count)
        yield failed

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


class WorkerMetrics:
    """What a worker's service process counts itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests_finished = Counter(
            "vllm:request_success", "Requests that ended, by reason", ["finished_reason"], registry=registry
        )
        self.failures = Counter("pdserve_failures", "Requests that ended with an error", ["code"], registry=registry)
        self.open_requests = Gauge("pdserve_open_requests", "Requests that have not ended", registry=registry)
        self.sessions = Gauge("pdserve_sessions", "Sessions of routers", registry=registry)
        self.handoff_streams = Gauge("pdserve_handoff_streams", "Control streams to peers", registry=registry)
        lane = ["lane"]
        self.transfer_seconds = Histogram(
            "pdserve_kv_transfer_seconds",
            "Decode: one hand-off's KV, first segment until verified; lane: the transfer backend",
            lane,
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )
        self.transfer_bytes = Histogram(
            "pdserve_kv_transfer_size_bytes", "Decode: its bytes", lane, buckets=BYTES_BUCKETS, registry=registry
        )
        self.transfer_gbps = Histogram(
            "pdserve_kv_transfer_gigabytes_per_second",
            "Decode: its bytes by its seconds, in 10^9 bytes/s; a transfer that waits for prefill is slow",
            lane,
            buckets=GBPS_BUCKETS,
            registry=registry,
        )
        self.engine_restarts = Counter("pdserve_engine_restarts", "Engines started after the first", registry=registry)

    def observe_transfer(self, lane: str, seconds: float, num_bytes: int) -> None:
        """One that is done. Without a byte (all was cached) it has no rate."""
        self.transfer_seconds.labels(lane).observe(seconds)
        self.transfer_bytes.labels(lane).observe(num_bytes)
        if num_bytes and seconds > 0:
            self.transfer_gbps.labels(lane).observe(num_bytes / seconds / 1e9)


class RouterMetrics:
    """What a router counts."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests_finished = Counter(
            "pdserve_router_requests", "Requests that ended, by reason", ["finished_reason"], registry=registry
        )
        self.failures = Counter("pdserve_failures", "Requests that ended with an error", ["code"], registry=registry)
        self.open_requests = Gauge("pdserve_open_requests", "Requests that have not ended", registry=registry)
        self.dispatches = Counter(
            "pdserve_dispatches", "Requests sent to a worker, attempts included", ["worker", "role"], registry=registry
        )
        self.local_prefills = Counter(
            "pdserve_local_prefills", "Requests sent without a hand-off", ["cause"], registry=registry
        )
        self.retries = Counter(
            "pdserve_retries", "Attempts after the first, by the failure before", ["code"], registry=registry
        )
        self.migrations = Counter(
            "pdserve_migrations", "Retries of requests that had streamed tokens", registry=registry
        )
        self.routed_tokens = Counter(
            "pdserve_routed_tokens", "Prompt tokens of dispatched requests, attempts included", registry=registry
        )
        self.routed_cached_tokens = Counter(
            "pdserve_routed_cached_tokens",
            "Those that the chosen worker has cached, as far as the router knows",
            ["side"],
            registry=registry,
        )
        self.blind_decisions = Counter(
            "pdserve_blind_decisions", "Requests placed without knowing who has which prefix", registry=registry
        )
        self.prefix_index_blocks = Gauge("pdserve_prefix_index_blocks", "Blocks with an owner", registry=registry)
        self.prefix_index_entries = Gauge(
            "pdserve_prefix_index_entries", "Blocks, counted for each of their owners", registry=registry
        )
        self.prefix_index_caught_up = Gauge(
            "pdserve_prefix_index_caught_up", "1: all known workers' blocks are in the index", registry=registry
        )
        self.prefix_index_resyncs = Counter(
            "pdserve_prefix_index_resyncs", "Snapshots taken of a worker met before", ["reason"], registry=registry
        )
        self.ejections = Counter(
            "pdserve_ejections",
            "Times that a worker was left out as all its requests failed",
            ["worker"],
            registry=registry,
        )
        self.ejected_workers = Gauge("pdserve_ejected_workers", "Workers that are left out now", registry=registry)
        self.tokens = Counter("pdserve_relayed_tokens", "Tokens relayed to gateways", registry=registry)
        self.dropped_outputs = Gauge(
            "pdserve_dropped_outputs",
            "Outputs about requests that had ended, since the sessions of the known workers began",
            registry=registry,
        )
        self.workers = Gauge("pdserve_workers", "Known workers", ["role", "state"], registry=registry)
        self.sessions = Gauge("pdserve_sessions", "Sessions of gateways", registry=registry)
        self.registry_failures = Counter(
            "pdserve_registry_failures", "Calls that Redis did not answer", registry=registry
        )
        self.route_seconds = Histogram(
            "pdserve_route_seconds", "Received until handed to workers", buckets=PHASE_BUCKETS_S, registry=registry
        )


class GatewayMetrics:
    """What a gateway measures: what the client sees."""

    def __init__(self, registry: CollectorRegistry) -> None:
        model = ["model_name"]
        self.requests_finished = Counter(
            "vllm:request_success", "Requests that ended, by reason", [*model, "finished_reason"], registry=registry
        )
        self.failures = Counter("pdserve_failures", "Requests that ended with an error", ["code"], registry=registry)
        self.http_requests = Counter(
            "pdserve_http_requests", "Answers, by endpoint and status", ["endpoint", "status"], registry=registry
        )
        self.grpc_requests = Counter(
            "pdserve_grpc_requests", "Calls of the SDK's service, by status", ["method", "status"], registry=registry
        )
        self.aborts = Counter("pdserve_aborts", "Requests aborted here, by reason", ["reason"], registry=registry)
        self.resumes = Counter("pdserve_resumes", "Requests opened again with their tokens so far", registry=registry)
        self.open_requests = Gauge("pdserve_open_requests", "Requests that have not ended", registry=registry)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens", model, registry=registry)
        self.generation_tokens = Counter("vllm:generation_tokens", "Tokens generated", model, registry=registry)
        self.cached_tokens = Counter(
            "pdserve_cached_tokens", "Prompt tokens taken from prefix caches", model, registry=registry
        )
        self.prefix_hit_tokens = Counter(
            "pdserve_prefix_hit_tokens",
            "Prompt tokens found in a prefix cache, by the role of the worker that had them; both may have the same",
            [*model, "source"],
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "vllm:time_to_first_token_seconds", "TTFT", model, buckets=TTFT_BUCKETS_S, registry=registry
        )
        self.inter_token_latency = Histogram(
            "vllm:inter_token_latency_seconds", "ITL", model, buckets=TOKEN_BUCKETS_S, registry=registry
        )
        self.time_per_output_token = Histogram(
            "vllm:request_time_per_output_token_seconds", "TPOT", model, buckets=TOKEN_BUCKETS_S, registry=registry
        )
        self.e2e_latency = Histogram(
            "vllm:e2e_request_latency_seconds", "Latency", model, buckets=LATENCY_BUCKETS_S, registry=registry
        )
        self.request_prompt_tokens = Histogram(
            "vllm:request_prompt_tokens", "Prompt length", model, buckets=LENGTH_BUCKETS_TOKENS, registry=registry
        )
        self.request_generation_tokens = Histogram(
            "vllm:request_generation_tokens", "Output length", model, buckets=LENGTH_BUCKETS_TOKENS, registry=registry
        )
        self.phase_seconds = Histogram(
            "pdserve_ttft_phase_seconds",
            "Parts of the time to the first token; they add up to it",
            [*model, "phase"],
            buckets=PHASE_BUCKETS_S,
            registry=registry,
        )

    def observe_phases(self, model_name: str, phases: Mapping[str, float]) -> None:
        """``phases``: seconds by the names in PHASES."""
        for phase in PHASES:
            self.phase_seconds.labels(model_name, phase).observe(max(0.0, phases.get(phase, 0.0)))
