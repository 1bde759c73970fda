"""One HTTP exchange: a JSON body read, and a call answered whole or as a stream of events.

What the JSON looks like is the endpoint's ``AnswerFormat``; what runs is ``serving.Call``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from gateway.choice import Delta
from gateway.http import CLIENT_GONE, JsonResponse, read_body, request_timeout_s, run_until_disconnect
from gateway.openai import SamplingFields, StrictModel, parse, read_json
from gateway.serving import Call, Choice, Gateway, usage
from gateway.sse import DONE, EventSink, EventStream, event
from gateway.text import INLINE_BYTES

Schema = TypeVar("Schema", bound=StrictModel)


class AnswerFormat(Protocol):
    """How an endpoint writes answers."""

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """The first chunk of a choice, if it has one of its own."""

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        """A delta as stream chunks: none when there is nothing to show."""

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that carries the usage."""

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed."""


class HttpExchange:
    """Made by an endpoint, which reads the body, makes the choices, then answers."""

    def __init__(self, gateway: Gateway, request: Request, endpoint: str, id_prefix: str) -> None:
        config = gateway.config
        self.call = Call(
            gateway,
            endpoint=endpoint,
            id_prefix=id_prefix,
            request_id=request.state.request_id,
            timeout_s=request_timeout_s(request, config.default_timeout_s, config.max_timeout_s),
            traceparent=request.headers.get("traceparent"),
        )
        self._gateway = gateway
        self._request = request

    async def read(self, schema: type[Schema]) -> Schema:
        """The request's body. Raises GatewayError."""
        body = await read_body(self._request, self._gateway.config.max_body_bytes)
        return await self._gateway.text.run(len(body) <= INLINE_BYTES, lambda: parse(schema, read_json(body)))

    async def answer(self, request: SamplingFields, choices: Sequence[Choice], answer_format: AnswerFormat) -> Response:
        """The HTTP response, whole or streamed."""
        self.call.prepared(choices)
        if request.stream:

            async def produce(sink: EventSink) -> None:
                await self._stream(choices, answer_format, sink, request.include_usage)

            config = self._gateway.config
            return EventStream(
                produce,
                max_buffer_bytes=config.max_stream_buffer_bytes,
                stall_timeout_s=config.stall_timeout_s,
                send_timeout_s=config.send_timeout_s,
            )
        answer = await run_until_disconnect(self._request, self._whole(choices, answer_format))
        return Response(status_code=CLIENT_GONE) if answer is None else JsonResponse(answer)

    async def _whole(self, choices: Sequence[Choice], answer_format: AnswerFormat) -> dict[str, Any]:
        await self.call.run(choices, Choice.keep)
        return answer_format.whole(choices, usage(choices))

    async def _stream(
        self, choices: Sequence[Choice], answer_format: AnswerFormat, sink: EventSink, include_usage: bool
    ) -> None:
        opened: set[int] = set()

        def write(chunk: dict[str, Any]) -> None:
            sink.write(event({**chunk, "usage": None} if include_usage else chunk))

        async def on_delta(choice: Choice, delta: Delta) -> None:
            if choice.index not in opened:
                opened.add(choice.index)
                if (opening := answer_format.opening(choice)) is not None:
                    write(opening)
            for chunk in answer_format.chunks(choice, delta):
                write(chunk)
            await sink.room()

        await self.call.run(choices, on_delta)
        if include_usage:
            sink.write(event(answer_format.usage_chunk(usage(choices))))
        sink.write(DONE)
