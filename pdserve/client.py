"""``pdserve.Client``: calls a gateway from ordinary, blocking code. ``pdserve.AsyncClient`` is its twin for asyncio.

One channel per endpoint, opened when it is first used and kept; gRPC reconnects it. A stream that breaks goes on at the
next endpoint, without a token lost or repeated (``progress``). Safe to share between threads; a stream has one reader.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from pdserve import requests, rpc
from pdserve.errors import PdserveError, RequestCancelledError
from pdserve.progress import Progress, Request
from pdserve.requests import Message, Options, Prompt
from pdserve.results import Chunk, Generation, Load, ModelInfo, Usage
from pdserve.retries import Endpoints, Retries, RetryPolicy
from pdserve.v1 import gateway_pb2 as pb
from pdserve.v1 import gateway_pb2_grpc

T = TypeVar("T")
DEFAULT_ENDPOINT = "127.0.0.1:8001"
DEFAULT_DEADLINE_S = 600.0


class Client:
    """Gateways that serve one model. Close it, or use it as a context manager."""

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
        """``endpoints``: HOST:PORT of the gateways' gRPC servers. ``model``: refuse a gateway that serves another one.

        ``deadline_s`` bounds each request, retries included; ``max_retries`` and ``reconnect_s`` as in ``retries``.
        """
        self._endpoints = Endpoints(endpoints)
        self._model = model
        self._deadline_s = deadline_s
        self._policy = RetryPolicy(max_retries=max_retries, reconnect_s=reconnect_s)
        self._credentials = credentials
        self._channels: dict[str, grpc.Channel] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def generate(
        self, prompt: Prompt, *, deadline_s: float | None = None, request_id: str = "", **options: Unpack[Options]
    ) -> Generation:
        """The answer to a text or to token ids. Raises PdserveError."""
        return self.stream(prompt, deadline_s=deadline_s, request_id=request_id, **options).result()

    def stream(
        self, prompt: Prompt, *, deadline_s: float | None = None, request_id: str = "", **options: Unpack[Options]
    ) -> Stream:
        """The same, chunk by chunk. Raises InvalidRequestError; the stream raises PdserveError."""
        return self._stream(requests.text_request(prompt, self._model, options), deadline_s, request_id)

    def chat(
        self,
        messages: Sequence[Message],
        *,
        deadline_s: float | None = None,
        request_id: str = "",
        **options: Unpack[Options],
    ) -> Generation:
        """The answer to a conversation. Raises PdserveError."""
        return self.stream_chat(messages, deadline_s=deadline_s, request_id=request_id, **options).result()

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        deadline_s: float | None = None,
        request_id: str = "",
        **options: Unpack[Options],
    ) -> Stream:
        """The same, chunk by chunk. Raises InvalidRequestError; the stream raises PdserveError."""
        return self._stream(requests.chat_request(messages, self._model, options), deadline_s, request_id)

    def model_info(self) -> ModelInfo:
        """What is served. Raises PdserveError."""
        info = self._call(lambda stub, **call: stub.GetModelInfo(pb.ModelInfoRequest(), **call))
        return ModelInfo(info.model, info.max_model_len, info.vocab_size, info.has_chat_template)

    def load(self) -> Load:
        """How busy the workers are. Raises PdserveError."""
        load = self._call(lambda stub, **call: stub.GetLoad(pb.LoadRequest(), **call))
        return Load(load.running, load.waiting, load.queued_tokens, load.free_blocks, load.total_blocks)

    def tokenize(self, text: str | Sequence[Message], *, skip_bos: bool = False) -> list[int]:
        """Token ids of a text, or of messages as the chat template writes them. Raises PdserveError."""
        request = requests.tokenize_request(text, self._model, skip_bos)
        return list(self._call(lambda stub, **call: stub.Tokenize(request, **call)).ids)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises PdserveError."""
        request = requests.detokenize_request(token_ids, self._model)
        return str(self._call(lambda stub, **call: stub.Detokenize(request, **call)).text)

    def close(self) -> None:
        """End what runs, with RequestCancelledError, and all connections."""
        self._closed.set()
        with self._lock:
            for channel in self._channels.values():
                channel.close()
            self._channels.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, request: Request, deadline_s: float | None, request_id: str) -> Stream:
        retries = Retries(self._policy, self._deadline_s if deadline_s is None else deadline_s)
        progress = Progress(request, requests.request_id_or_new(request_id))
        return Stream(self._stub, self._endpoints, retries, progress, self._closed)

    def _stub(self, address: str) -> gateway_pb2_grpc.InferenceStub:
        """Raises RequestCancelledError once the client is closed."""
        with self._lock:
            if self._closed.is_set():
                raise RequestCancelledError("the client is closed")
            channel = self._channels.get(address)
            if channel is None:
                channel = self._channels[address] = _open(address, self._credentials)
            return gateway_pb2_grpc.InferenceStub(channel)

    def _call(self, method: Callable[..., T]) -> T:
        """A call with one answer, retried as the policy says."""
        retries = Retries(self._policy, self._deadline_s)
        request_id = uuid.uuid4().hex
        while True:
            address = self._endpoints.current
            try:
                metadata = ((rpc.REQUEST_ID, request_id),)
                return method(self._stub(address), timeout=retries.left_s, metadata=metadata)
            except grpc.RpcError as failure:
                error = _error(failure, address, request_id, retries.deadline_s)
                self._endpoints.avoid(address)
                self._closed.wait(retries.pause_s(error))


class Stream(Iterator[Chunk]):
    """The chunks of one request. Read to its end, cancelled or closed: leaving it open keeps the request running."""

    def __init__(
        self,
        stub: Callable[[str], gateway_pb2_grpc.InferenceStub],
        endpoints: Endpoints,
        retries: Retries,
        progress: Progress,
        closed: threading.Event,
    ) -> None:
        self._stub = stub
        self._endpoints = endpoints
        self._retries = retries
        self._progress = progress
        self._client_closed = closed
        self._chunks: deque[Chunk] = deque()
        self._cancelled = threading.Event()
        self._is_over = False
        self._address = endpoints.current
        self._call: Any = None
        self._open()

    @property
    def request_id(self) -> str:
        """Names the request in logs, traces and /debug/requests."""
        return self._progress.request_id

    @property
    def usage(self) -> Usage | None:
        """Set at the end."""
        return self._progress.usage

    def cancel(self) -> None:
        """End the request, from any thread: the workers drop it, and its reader gets RequestCancelledError."""
        self._cancelled.set()
        if (call := self._call) is not None:
            call.cancel()

    def result(self) -> Generation:
        """The whole answer, also of chunks that were read before. Raises PdserveError."""
        for _ in self:
            pass
        return self._progress.result()

    def __next__(self) -> Chunk:
        while not self._chunks:
            if self._is_over:
                raise StopIteration
            try:
                self._advance()
            except BaseException:
                self._is_over = True
                self._call.cancel()
                raise
        return self._chunks.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_over:
            self.cancel()

    def _advance(self) -> None:
        """The next message, or the next try."""
        try:
            if self._cancelled.is_set():
                raise self._was_cancelled()
            response = next(self._call, None)
        except grpc.RpcError as failure:
            if self._cancelled.is_set() or self._client_closed.is_set():
                raise self._was_cancelled() from failure
            self._try_again(_error(failure, self._address, self.request_id, self._retries.deadline_s))
            return
        if response is not None:
            self._retries.made_contact()
            self._chunks.extend(self._progress.take(response))
        elif self.usage is None:
            self._try_again(rpc.connection_failed(self._address, "the stream broke off", self.request_id))
        else:
            self._is_over = True

    def _try_again(self, error: PdserveError) -> None:
        """Raises ``error`` when that is no use."""
        self._progress.check_can_go_on(error)
        self._endpoints.avoid(self._address)
        if self._cancelled.wait(self._retries.pause_s(error)):
            raise self._was_cancelled() from error
        self._open()

    def _open(self) -> None:
        self._address = self._endpoints.current
        stub, request = self._stub(self._address), self._progress.next_request()
        metadata = ((rpc.REQUEST_ID, self.request_id),)
        try:
            if isinstance(request, pb.TextRequest):
                self._call = stub.Generate(request, timeout=self._retries.left_s, metadata=metadata)
            else:
                self._call = stub.Chat(request, timeout=self._retries.left_s, metadata=metadata)
        except ValueError as error:  # gRPC's word for a channel that another thread has just closed
            if self._client_closed.is_set():
                raise self._was_cancelled() from error
            raise

    def _was_cancelled(self) -> RequestCancelledError:
        return RequestCancelledError("the request was cancelled by its caller", request_id=self.request_id)


def _open(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    if credentials is None:
        return grpc.insecure_channel(address, options=rpc.OPTIONS)
    return grpc.secure_channel(address, credentials, options=rpc.OPTIONS)


def _error(failure: grpc.RpcError, address: str, request_id: str, deadline_s: float) -> PdserveError:
    call: Any = failure  # a failed call is its own error
    return rpc.to_error(
        call.code(),
        call.details() or "",
        list(call.trailing_metadata() or ()),
        address=address,
        request_id=request_id,
        deadline_s=deadline_s,
    )
