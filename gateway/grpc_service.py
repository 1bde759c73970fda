"""The gateway's gRPC front: the same requests as over HTTP (``serving.Call``), for the SDK in ``pdserve``.

Owns deadlines and cancellation of calls, errors as gRPC statuses, and the bounded buffer of each stream, which works as
for SSE: serialized messages wait in an ``EventSink``, and because joined protobuf messages are one merged message, what
the client has not read leaves as one write.

    outputs -> [session's buffer] -> producer -> [EventSink] -> sender -> client
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import structlog

from gateway import grpc_requests as translate
from gateway.chat import chat_choices
from gateway.choice import Delta
from gateway.completions import completion_choices
from gateway.errors import GatewayError, internal, slow_consumer
from gateway.http import REQUEST_ID, request_id_or_new
from gateway.sampling import check_token_ids
from gateway.serving import Call, Choice, Gateway
from gateway.sse import EventSink
from gateway.text import INLINE_BYTES, INLINE_TOKENS
from pdserve.channel import serve
from pdserve.errors import ERROR_DETAIL_KEY
from pdserve.v1 import gateway_pb2 as pb
from pdserve.v1 import gateway_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]
DEADLINE_MARGIN_S = 0.02
"""We end a request before gRPC does, so that the client hears why and the workers hear ``deadline``, not ``client``."""

_STATUS = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

log = structlog.get_logger()


async def serve_grpc(
    gateway: Gateway, host: str, port: int, *, share_port: bool = False
) -> tuple[grpc.aio.Server, int]:
    """Start the gRPC server; the caller stops it. Raises OSError when the port cannot be had."""
    return await serve(
        [InferenceService(gateway)],
        host,
        port,
        is_ready=lambda: gateway.not_ready_reason is None,
        share_port=share_port,
    )


class InferenceService(gateway_pb2_grpc.InferenceServicer):
    """The servicer."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Generate(self, request: pb.TextRequest, context: Context) -> None:  # type: ignore[override]  # it writes
        async with self._served("Generate", context) as request_id:
            call = self._call("Generate", request_id, context)
            model = self._gateway.model
            body = await self._gateway.text.run(
                request.ByteSize() <= INLINE_BYTES, lambda: translate.completion_request(request, model)
            )
            choices = await completion_choices(call, body)
            await self._answer(call, choices, request, context)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        async with self._served("Chat", context) as request_id:
            call = self._call("Chat", request_id, context)
            model = self._gateway.model
            body = await self._gateway.text.run(
                request.ByteSize() <= INLINE_BYTES, lambda: translate.chat_request(request, model)
            )
            choices = await chat_choices(call, body)
            await self._answer(call, choices, request, context)

    async def GetModelInfo(self, request: pb.ModelInfoRequest, context: Context) -> pb.ModelInfo:
        model = self._gateway.model
        return pb.ModelInfo(
            model=model.name,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            has_chat_template=model.chat_template is not None,
        )

    async def GetLoad(self, request: pb.LoadRequest, context: Context) -> pb.FleetLoad:
        load = self._gateway.routers.load
        return pb.FleetLoad(
            running=load.running,
            waiting=load.waiting,
            queued_tokens=load.queued_tokens,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenIds:
        async with self._served("Tokenize", context):
            gateway = self._gateway
            gateway.check_model(request.model or None)
            if request.messages:
                chat = translate.tokenize_chat_request(request)
                messages = [message.for_template() for message in chat.messages]
                return pb.TokenIds(ids=await gateway.text.encode_chat(messages, **chat.template_options))
            return pb.TokenIds(ids=await gateway.text.encode(request.text, not request.skip_bos))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with self._served("Detokenize", context):
            gateway = self._gateway
            gateway.check_model(request.model or None)
            token_ids = check_token_ids(list(request.token_ids), gateway.model, "token_ids")
            return pb.DetokenizeResponse(text=await gateway.text.decode(token_ids, skip_special_tokens=False))

    @contextlib.asynccontextmanager
    async def _served(self, method: str, context: Context) -> AsyncIterator[str]:
        """Around each call: its id, admission, and errors as statuses."""
        metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
        given = metadata.get(REQUEST_ID)
        request_id = request_id_or_new(given if isinstance(given, str) else None)
        await context.send_initial_metadata(((REQUEST_ID, request_id),))
        error = self._gateway.admission.enter()
        is_admitted = error is None
        status = "CANCELLED"
        try:
            if error is None:
                yield request_id
                status = "OK"
            else:
                raise error
        except GatewayError as known:
            error = known
        except Exception:
            log.exception("request failed", request_id=request_id, method=method)
            error = internal()
        finally:
            if is_admitted:
                self._gateway.admission.leave()
            if error is not None:
                status = _status(error).name
            self._gateway.metrics.grpc_requests.labels(method, status).inc()
        if error is not None:
            detail = translate.error_detail(error).SerializeToString()
            await context.abort(_status(error), error.message, ((ERROR_DETAIL_KEY, detail),))

    def _call(self, method: str, request_id: str, context: Context) -> Call:
        config = self._gateway.config
        left_s = context.time_remaining()
        traceparent = next((value for key, value in context.invocation_metadata() or () if key == "traceparent"), None)
        timeout_s = config.default_timeout_s if left_s is None else max(left_s - DEADLINE_MARGIN_S, left_s / 2)
        return Call(
            self._gateway,
            endpoint=f"grpc/{method}",
            id_prefix="gen",
            request_id=request_id,
            timeout_s=min(max(timeout_s, 0.001), config.max_timeout_s),
            traceparent=traceparent if isinstance(traceparent, str) else None,
        )

    async def _answer(
        self, call: Call, choices: Sequence[Choice], request: pb.TextRequest | pb.ChatRequest, context: Context
    ) -> None:
        """Stream what the choices bring, then the usage. Raises GatewayError."""
        gateway = self._gateway
        translate.check_so_far(request.so_far, gateway.model)
        num_so_far = sum(len(given.token_ids) for given in request.so_far)
        await gateway.text.run(
            num_so_far <= INLINE_TOKENS, lambda: translate.go_on(choices, request.so_far, request.options)
        )
        call.prepared(choices)
        tokenizer = gateway.model.tokenizer
        sink = EventSink(gateway.config.max_stream_buffer_bytes, gateway.config.stall_timeout_s)

        async def on_delta(choice: Choice, delta: Delta) -> None:
            sink.write(translate.response(choice, delta, tokenizer).SerializeToString())
            await sink.room()

        async def produce() -> None:
            try:
                await call.run(choices, on_delta)
                sink.write(translate.last_response(choices).SerializeToString())
            finally:
                sink.close()

        producer = asyncio.create_task(produce())
        sender = asyncio.create_task(_send(sink, context))
        try:
            await asyncio.wait([producer, sender], return_when=asyncio.FIRST_COMPLETED)
            if not producer.done():
                return  # the sender has found the client gone
            error = producer.exception()
            if isinstance(error, GatewayError) and error.code == "slow_consumer":
                raise error  # it would not read the rest either
            await asyncio.wait([sender], timeout=gateway.config.send_timeout_s)
            producer.result()
            if not sender.done():
                raise slow_consumer()
        finally:
            for task in (producer, sender):
                task.cancel()
            await asyncio.gather(producer, sender, return_exceptions=True)


async def _send(sink: EventSink, context: Context) -> None:
    while data := await sink.take():
        await context.write(pb.GenerateResponse.FromString(data))


def _status(error: GatewayError) -> grpc.StatusCode:
    return _STATUS.get(error.status, grpc.StatusCode.INTERNAL)
