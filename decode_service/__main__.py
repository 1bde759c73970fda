"""``python -m decode_service``: flags in, a running worker out."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from worker import config
from worker.app import run


def main(
    model: config.Model,
    worker_id: config.WorkerId = "decode-0",
    role: Annotated[
        Literal["decode", "aggregated"], typer.Option(help="decode | aggregated (prefills everything itself).")
    ] = "decode",
    host: config.Host = "127.0.0.1",
    port: config.Port = 0,
    metrics_port: config.MetricsPort = 0,
    redis: config.Redis = "redis://127.0.0.1:6379",
    advertised_host: config.AdvertisedHost = "",
    device: config.Device = None,
    gpu_memory_utilization: config.GpuMemoryUtilization = None,
    load_format: config.LoadFormat = None,
    dtype: config.Dtype = None,
    block_size: config.BlockSize = None,
    num_blocks: config.NumBlocks = None,
    kv_cache_bytes: config.KvCacheBytes = None,
    host_kv_bytes: config.HostKvBytes = None,
    max_model_len: config.MaxModelLen = None,
    max_num_seqs: config.MaxNumSeqs = None,
    max_num_batched_tokens: config.MaxNumBatchedTokens = None,
    itl_budget_ms: config.ItlBudgetMs = None,
    num_threads: config.NumThreads = None,
    enable_prefix_caching: config.PrefixCaching = True,
    transfer: config.Transfer = "auto",
    data_port: config.DataPort = 0,
    drain_timeout_s: config.DrainTimeout = 30.0,
    tls_dir: config.TlsDir = "",
    otlp_endpoint: config.OtlpEndpoint = "",
) -> None:
    """A decode worker: takes KV from prefill workers and streams tokens; or an aggregated one."""
    try:
        worker = config.WorkerConfig(
            role=role,
            worker_id=worker_id,
            model=model,
            host=host,
            port=port,
            metrics_port=metrics_port,
            redis_url=redis,
            advertised_host=advertised_host,
            transfer=transfer,
            data_port=data_port,
            drain_timeout_s=drain_timeout_s,
            tls_dir=tls_dir,
            otlp_endpoint=otlp_endpoint,
            engine_module="decode_service.engine_main",
            engine_options=config.engine_options(
                device=device,
                gpu_memory_utilization=gpu_memory_utilization,
                load_format=load_format,
                dtype=dtype,
                block_size=block_size,
                num_blocks=num_blocks,
                kv_cache_bytes=kv_cache_bytes,
                host_kv_bytes=host_kv_bytes,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                itl_budget_ms=itl_budget_ms,
                num_threads=num_threads,
                enable_prefix_caching=enable_prefix_caching,
            ),
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    sys.exit(run(worker))


if __name__ == "__main__":
    typer.run(main)
