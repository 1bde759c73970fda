"""``pdserve.AsyncClient``: calls a gateway from asyncio. What ``pdserve.Client`` does, with ``await``.

Cancelling the task that reads a stream cancels the request; ``Stream.cancel`` does so from elsewhere. Belongs to the
event loop in which it is first used.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc

from pdserve import requests, rpc
from pdserve.client import DEFAULT_DEADLINE_S, DEFAULT_ENDPOINT
from pdserve.errors import PdserveError, RequestCancelledError
from pdserve.progress import Progress, Request
from pdserve.requests import Message, Options, Prompt
from pdserve.results import Chunk, Generation, Load, ModelInfo, Usage
from pdserve.retries import Endpoints, Retries, RetryPolicy
from pdserve.v1 import gateway_pb2 as pb
from pdserve.v1 import gateway_pb2_grpc

if TYPE_CHECKING:
    Stub = gateway_pb2_grpc.InferenceAsyncStub

T = TypeVar("T")


class AsyncClient:
    """Gateways that serve one model. Close it, or use it as an asynchronous context manager."""

    def __init__(
        self,
        endpoints: str | Sequence[str] = DEFAULT_ENDPOINT,
        *,
        model: str = "",
        deadline_s: float = DEFAULT_DEADLINE_S,
        max_retries: int = 2,
        reconnect_s: float = 5.0,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """As of ``Client``."""
        self._endpoints = Endpoints(endpoints)
        self._model = model
        self._deadline_s = deadline_s
        self._policy = RetryPolicy(max_retries=max_retries, reconnect_s=reconnect_s)
        self._credentials = credentials
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._is_closed = False

    async def generate(
        self, prompt: Prompt, *, deadline_s: float | None = None, request_id: str = "", **options: Unpack[Options]
    ) -> Generation:
        """The answer to a text or to token ids. Raises PdserveError."""
        return await self.stream(prompt, deadline_s=deadline_s, request_id=request_id, **options).result()

    def stream(
        self, prompt: Prompt, *, deadline_s: float | None = None, request_id: str = "", **options: Unpack[Options]
    ) -> AsyncStream:
        """The same, chunk by chunk. Raises InvalidRequestError; the stream raises PdserveError."""
        return self._stream(requests.text_request(prompt, self._model, options), deadline_s, request_id)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        deadline_s: float | None = None,
        request_id: str = "",
        **options: Unpack[Options],
    ) -> Generation:
        """The answer to a conversation. Raises PdserveError."""
        return await self.stream_chat(messages, deadline_s=deadline_s, request_id=request_id, **options).result()

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        deadline_s: float | None = None,
        request_id: str = "",
        **options: Unpack[Options],
    ) -> AsyncStream:
        """The same, chunk by chunk. Raises InvalidRequestError; the stream raises PdserveError."""
        return self._stream(requests.chat_request(messages, self._model, options), deadline_s, request_id)

    async def model_info(self) -> ModelInfo:
        """What is served. Raises PdserveError."""
        info = await self._call(lambda stub, **call: stub.GetModelInfo(pb.ModelInfoRequest(), **call))
        return ModelInfo(info.model, info.max_model_len, info.vocab_size, info.has_chat_template)

    async def load(self) -> Load:
        """How busy the workers are. Raises PdserveError."""
        load = await self._call(lambda stub, **call: stub.GetLoad(pb.LoadRequest(), **call))
        return Load(load.running, load.waiting, load.queued_tokens, load.free_blocks, load.total_blocks)

    async def tokenize(self, text: str | Sequence[Message], *, skip_bos: bool = False) -> list[int]:
        """Token ids of a text, or of messages as the chat template writes them. Raises PdserveError."""
        request = requests.tokenize_request(text, self._model, skip_bos)
        return list((await self._call(lambda stub, **call: stub.Tokenize(request, **call))).ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises PdserveError."""
        request = requests.detokenize_request(token_ids, self._model)
        return str((await self._call(lambda stub, **call: stub.Detokenize(request, **call))).text)

    async def close(self) -> None:
        """End what runs, with RequestCancelledError, and all connections."""
        self._is_closed = True
        channels = list(self._channels.values())
        self._channels.clear()
        await asyncio.gather(*(channel.close(None) for channel in channels))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, request: Request, deadline_s: float | None, request_id: str) -> AsyncStream:
        retries = Retries(self._policy, self._deadline_s if deadline_s is None else deadline_s)
        return AsyncStream(
            self._stub, self._endpoints, retries, Progress(request, requests.request_id_or_new(request_id))
        )

    def _stub(self, address: str) -> Stub:
        """Raises RequestCancelledError once the client is closed."""
        if self._is_closed:
            raise RequestCancelledError("the client is closed")
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = _open(address, self._credentials)
        stub: Stub = gateway_pb2_grpc.InferenceStub(channel)
        return stub

    async def _call(self, method: Callable[..., Awaitable[T]]) -> T:
        """A call with one answer, retried as the policy says."""
        retries = Retries(self._policy, self._deadline_s)
        request_id = uuid.uuid4().hex
        while True:
            address = self._endpoints.current
            try:
                metadata = ((rpc.REQUEST_ID, request_id),)
                return await method(self._stub(address), timeout=retries.left_s, metadata=metadata)
            except grpc.aio.AioRpcError as failure:
                error = _error(failure, address, request_id, retries.deadline_s)
                self._endpoints.avoid(address)
                await asyncio.sleep(retries.pause_s(error))


class AsyncStream(AsyncIterator[Chunk]):
    """The chunks of one request. Starts when it is first read; read to its end, cancelled or closed."""

    def __init__(self, stub: Callable[[str], Stub], endpoints: Endpoints, retries: Retries, progress: Progress) -> None:
        self._stub = stub
        self._endpoints = endpoints
        self._retries = retries
        self._progress = progress
        self._chunks: deque[Chunk] = deque()
        self._cancelled = asyncio.Event()
        self._is_over = False
        self._address = endpoints.current
        self._call: Any = None

    @property
    def request_id(self) -> str:
        """Names the request in logs, traces and /debug/requests."""
        return self._progress.request_id

    @property
    def usage(self) -> Usage | None:
        """Set at the end."""
        return self._progress.usage

    def cancel(self) -> None:
        """End the request: the workers drop it, and its reader gets RequestCancelledError."""
        self._cancelled.set()
        if self._call is not None:
            self._call.cancel()

    async def result(self) -> Generation:
        """The whole answer, also of chunks that were read before. Raises PdserveError."""
        async for _ in self:
            pass
        return self._progress.result()

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._is_over:
                raise StopAsyncIteration
            try:
                await self._advance()
            except BaseException:
                self._is_over = True
                self.cancel()
                raise
        return self._chunks.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            self.cancel()

    async def _advance(self) -> None:
        """The next message, or the next try."""
        if self._cancelled.is_set():
            raise self._was_cancelled()
        if self._call is None:
            self._open()
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            await self._try_again(_error(failure, self._address, self.request_id, self._retries.deadline_s))
            return
        except asyncio.CancelledError as cancelled:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # gRPC's word for a call that was cancelled here, by ``cancel`` or because the client was closed
            raise self._was_cancelled() from cancelled
        if isinstance(response, pb.GenerateResponse):
            self._retries.made_contact()
            self._chunks.extend(self._progress.take(response))
        elif self.usage is None:
            await self._try_again(rpc.connection_failed(self._address, "the stream broke off", self.request_id))
        else:
            self._is_over = True

    async def _try_again(self, error: PdserveError) -> None:
        """Raises ``error`` when that is no use."""
        self._progress.check_can_go_on(error)
        self._endpoints.avoid(self._address)
        try:
            async with asyncio.timeout(self._retries.pause_s(error)):
                await self._cancelled.wait()
        except TimeoutError:
            self._open()
        else:
            raise self._was_cancelled() from error

    def _open(self) -> None:
        self._address = self._endpoints.current
        stub, request = self._stub(self._address), self._progress.next_request()
        metadata = ((rpc.REQUEST_ID, self.request_id),)
        if isinstance(request, pb.TextRequest):
            self._call = stub.Generate(request, timeout=self._retries.left_s, metadata=metadata)
        else:
            self._call = stub.Chat(request, timeout=self._retries.left_s, metadata=metadata)

    def _was_cancelled(self) -> RequestCancelledError:
        return RequestCancelledError("the request was cancelled by its caller", request_id=self.request_id)


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=rpc.OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=rpc.OPTIONS)


def _error(failure: grpc.aio.AioRpcError, address: str, request_id: str, deadline_s: float) -> PdserveError:
    trailers: Any = failure.trailing_metadata()  # pairs, which the stubs do not know
    return rpc.to_error(
        failure.code(),
        failure.details() or "",
        list(trailers or ()),
        address=address,
        request_id=request_id,
        deadline_s=deadline_s,
    )
