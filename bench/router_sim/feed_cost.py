"""``python -m bench.router_sim.feed_cost --redis URL``: what following the workers' streams costs a router.

Uses worker ids ``feed-cost-N`` in a Redis that may be in use; they expire.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Annotated

import redis as sync_redis
import typer
from prometheus_client import CollectorRegistry

from pdserve.identity import new_identity
from pdserve.session import Session
from registry import WorkerRecord
from registry.kv_events import Batch, Cleared, Stored, encode_events
from registry.ownership import Ownership
from router.ownership_feed import OwnershipFeed
from router.policies.load import WorkerLoad
from router.prefix_index import PrefixIndex
from router.workers import Worker
from telemetry.metrics import RouterMetrics

BLOCKS_OF_A_BATCH = 16
TICK_S = 0.02


def main(
    redis: Annotated[str, typer.Option(help="redis:// or unix://")],
    workers: Annotated[int, typer.Option()] = 1000,
    batches_per_s: Annotated[int, typer.Option(help="of all workers together, 16 new blocks each")] = 5000,
    seconds: Annotated[float, typer.Option()] = 3.0,
) -> None:
    """Cores used by the feed while it follows, and seconds of processor time to catch up."""
    asyncio.run(_measure(redis, [f"feed-cost-{i}" for i in range(workers)], batches_per_s, seconds))


async def _measure(url: str, names: list[str], batches_per_s: int, seconds: float) -> None:
    ownership, index = Ownership(url), PrefixIndex()
    incarnation = time.time_ns() // 1000
    for name in names:
        await ownership.publish(name, Batch(incarnation, 1, [Cleared(), Stored(os.urandom(16 * 64))]))
    fleet = {name: _worker(name) for name in names}
    feed = OwnershipFeed(ownership, index, fleet, RouterMetrics(CollectorRegistry()))
    started_s = time.thread_time()
    await feed.turn()
    typer.echo(f"{len(names)} workers, caught up in {time.thread_time() - started_s:.3f} s of processor time")
    publisher = threading.Thread(target=_publish, args=(url, names, incarnation, batches_per_s, seconds + 1))
    publisher.start()
    following = asyncio.create_task(feed.run())
    started_s, wall_s, blocks = time.thread_time(), time.monotonic(), index.num_blocks
    await asyncio.sleep(seconds)
    wall_s = time.monotonic() - wall_s
    cores = (time.thread_time() - started_s) / wall_s
    typer.echo(f"{(index.num_blocks - blocks) / wall_s:,.0f} blocks/s followed with {cores:.2f} cores")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await asyncio.to_thread(publisher.join)
    await ownership.close()


def _worker(name: str) -> Worker:
    record = WorkerRecord(
        worker_id=name,
        role="decode",
        address="nowhere:1",
        incarnation=1,
        fingerprint="",
        model="",
        max_model_len=1,
        pool_tokens=1,
        hash_block_tokens=16,
    )
    return Worker(record, Session(record.address, new_identity("router", "feed-cost")), WorkerLoad())


def _publish(url: str, names: list[str], incarnation: int, batches_per_s: int, seconds: float) -> None:
    """Straight into the streams: what the scripts cost Redis is not asked here."""
    with sync_redis.Redis.from_url(url) as client:
        turn, end_s = 0, time.monotonic() + seconds
        while time.monotonic() < end_s:
            pipeline = client.pipeline(transaction=False)
            for _ in range(int(batches_per_s * TICK_S)):
                events = encode_events([Stored(os.urandom(16 * BLOCKS_OF_A_BATCH))])
                fields = {"i": f"{incarnation:020d}", "f": str(3 + turn // len(names)), "e": events}
                pipeline.xadd(f"{{pdserve}}:kv:{names[turn % len(names)]}:events", fields, maxlen=512)
                turn += 1
            pipeline.execute()
            time.sleep(TICK_S)


if __name__ == "__main__":
    typer.run(main)
