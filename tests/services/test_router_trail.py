"""What the router tells about where a request was sent: in the outputs, and in the trace."""

from __future__ import annotations

import asyncio
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pdserve.v1 import inference_pb2 as pb
from telemetry.tracing import SdkTracer
from tests.services.fake_worker import Behaviour
from tests.services.processes import running_redis
from tests.services.test_router import running_fleet

FAILS = Behaviour(fail_code="ERROR_CODE_WORKER_LOST")


def attempts(output: pb.Output) -> list[tuple[str, str, str]]:
    return [(item.prefill_worker, item.decode_worker, item.failure) for item in output.route.attempts]


async def test_the_first_output_and_a_late_end_say_who_was_tried(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        async with running_fleet(redis, router_id="r0") as fleet:
            await fleet.add("p0", "prefill")
            await fleet.add("d0", "decode")
            answer = await fleet.ask(4)
            first, *rest = answer.outputs
            assert attempts(first) == [("p0", "d0", "")]
            assert first.route.router == "r0"
            assert not any(output.HasField("route") for output in rest)

            fleet.workers["d0"].behaviour = Behaviour(fail_code="ERROR_CODE_WORKER_LOST", fail_after_tokens=2)
            await fleet.add("d1", "decode")
            answers = [await fleet.ask(6) for _ in range(2)]  # one of them begins at d0
            [moved] = [answer for answer in answers if attempts(answer.outputs[0]) == [("p0", "d0", "")]]
            assert attempts(moved.outputs[-1]) == [("p0", "d0", "ERROR_CODE_WORKER_LOST"), ("p0", "d1", "")]
            assert all(item.duration_s > 0 for item in moved.outputs[-1].route.attempts)


async def test_a_refusal_says_who_was_tried(tmp_path: Path) -> None:
    with running_redis(tmp_path) as redis:
        async with running_fleet(redis, max_attempts=2) as fleet:
            await fleet.add("p0", "prefill")
            await fleet.add("d0", "decode", behaviour=FAILS)
            answer = await fleet.ask(4)
            assert attempts(answer.outputs[-1]) == [("p0", "d0", "ERROR_CODE_WORKER_LOST")] * 2


async def test_every_span_ends_whatever_becomes_of_the_request(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with running_redis(tmp_path) as redis:
        async with running_fleet(redis) as fleet:
            fleet.router._service._tracer = SdkTracer(provider)
            await fleet.add("p0", "prefill")
            await fleet.add("d0", "decode", behaviour=Behaviour(token_interval_s=0.05))
            handle = fleet.open(100)
            await anext(handle)
            handle.abort("client")
            async with asyncio.timeout(10):
                while len(exporter.get_finished_spans()) < 3:  # noqa: ASYNC110  # filled by the router
                    await asyncio.sleep(0.01)
            assert errors(exporter.get_finished_spans()) == {"choose": None, "attempt 1": "client", "route": "client"}
            contexts = {
                request.traceparent.rpartition("-")[0] for worker in fleet.workers.values() for request in worker.opened
            }
            [attempt] = [span for span in exporter.get_finished_spans() if span.name == "attempt 1"]
            assert contexts == {f"00-{attempt.context.trace_id:032x}-{attempt.context.span_id:016x}"}


def errors(spans: tuple[ReadableSpan, ...]) -> dict[str, str | None]:
    return {span.name: span.status.description for span in spans}
