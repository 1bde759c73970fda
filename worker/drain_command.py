"""``pdserve drain WORKER``: asks a worker to leave, shows how far it is, and returns when it has left.

The worker's id is looked up in the registry; the rest is a call to the worker itself (``WorkerAdmin.Drain``), so that
what is shown is what happens, and a worker that dies meanwhile is an error.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import grpc
import typer

from pdserve.cache import running_clusters
from pdserve.channel import open_channel
from pdserve.tls import Tls, from_option
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from registry import RegistryUnavailable, WorkerRecord, WorkerRegistry

LOCAL_REDIS = "redis://127.0.0.1:6379"
CONNECT_S = 5.0
SILENCE_S = 10.0
"""A worker that drains says so every second."""


class CannotDrain(Exception):
    """One line that names the remedy."""


def main(
    worker: Annotated[str, typer.Argument(help="Its --worker-id.")],
    redis: Annotated[
        str | None,
        typer.Option(
            help="redis://, rediss:// or unix://; where it has registered.",
            show_default="that of the `pdserve up` that runs here, else redis://127.0.0.1:6379",
        ),
    ] = None,
    tls_dir: Annotated[
        str, typer.Option(envvar="PDSERVE_TLS_DIR", help="tls.crt, tls.key, ca.crt, if the cluster uses mutual TLS.")
    ] = "",
) -> None:
    """Let a worker finish what runs, send it nothing new, and end it. Whoever supervises it may start it again."""
    try:
        asyncio.run(drain(worker, redis or redis_of_this_host(), from_option(tls_dir)))
    except (CannotDrain, ValueError) as error:
        print(f"pdserve: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("\nThe worker goes on draining.", file=sys.stderr)
        raise typer.Exit(130) from None


def redis_of_this_host() -> str:
    """Where the workers of the one cluster here register. Raises CannotDrain when there are several."""
    clusters = running_clusters()
    if len(clusters) > 1:
        raise CannotDrain(f"{len(clusters)} clusters run here: give --redis one of {', '.join(clusters)}")
    return clusters[0] if clusters else LOCAL_REDIS


async def drain(worker_id: str, redis_url: str, tls: Tls | None = None) -> None:
    """Returns when the worker has nothing to do any more. Raises CannotDrain."""
    record = await find(worker_id, redis_url)
    print(f"draining {worker_id}, a {record.role} worker at {record.address}", flush=True)
    async with open_channel(record.address, tls) as channel:
        try:
            async with asyncio.timeout(CONNECT_S):
                await channel.channel_ready()
        except TimeoutError:
            raise CannotDrain(f"{worker_id} does not answer at {record.address}: is it reachable from here?") from None
        call = worker_pb2_grpc.WorkerAdminStub(channel).Drain(worker_pb2.DrainRequest())
        try:
            async with asyncio.timeout(SILENCE_S) as silence:
                async for progress in call:
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
                    if progress.drained:
                        print(f"{worker_id} is drained", flush=True)
                        return
                    many = "1 request runs" if progress.open_requests == 1 else f"{progress.open_requests} requests run"
                    print(f"  {many} there; {progress.left_s:.0f} s until they go on elsewhere", flush=True)
        except TimeoutError:
            raise CannotDrain(f"{worker_id} has not said anything for {SILENCE_S:.0f} s: look at its log") from None
        except grpc.aio.AioRpcError as error:
            raise CannotDrain(f"{worker_id} ended before it was drained ({error.details()}): look at its log") from None
    raise CannotDrain(f"{worker_id} ended before it was drained: look at its log")


async def find(worker_id: str, redis_url: str) -> WorkerRecord:
    """The worker's registration. Raises CannotDrain."""
    registry = WorkerRegistry(redis_url)
    try:
        records = await registry.list_workers()
    except RegistryUnavailable as error:
        raise CannotDrain(f"{error}: is --redis right?") from None
    finally:
        await registry.close()
    for record in records:
        if record.worker_id == worker_id:
            return record
    known = ", ".join(record.worker_id for record in records) or "none at all"
    raise CannotDrain(f"no worker {worker_id!r} is registered; there are: {known}")


if __name__ == "__main__":
    typer.run(main)
