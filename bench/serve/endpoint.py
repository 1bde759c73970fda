"""One OpenAI endpoint: encodes requests, sends them, and notes when each piece of the answer came.

A chunk counts when it carries text: role chunks, usage and empty deltas are no tokens. Lengths are the server's own
``usage``. The clock is read once for each piece of data off the socket, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import aiohttp
import numpy as np
import orjson

from bench.serve.records import Outcome, Record, Samples
from bench.serve.workload import BenchRequest, as_text

CONNECT_TIMEOUT_S = 30.0
REFUSED_STATUS = 429
MAX_ERROR_CHARS = 300


class EndpointError(Exception):
    """The endpoint cannot be used; the message names the remedy."""


class Endpoint:
    """Use as an asynchronous context manager."""

    def __init__(
        self,
        url: str,
        *,
        is_chat: bool,
        model: str,
        ignore_eos: bool,
        temperature: float | None,
        extra_body: dict[str, Any],
        text_only: bool,
        api_key: str | None,
        timeout_s: float,
    ) -> None:
        self.url = url
        self._is_chat = is_chat
        self._text_only = text_only or is_chat
        self._common: dict[str, Any] = {"model": model, "stream": True, "stream_options": {"include_usage": True}}
        if temperature is not None:
            self._common["temperature"] = temperature
        if ignore_eos:
            self._common["ignore_eos"] = True
        self._common |= extra_body
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    def encode(self, request: BenchRequest) -> bytes:
        """The body. Raises EndpointError for a prompt that this endpoint does not take."""
        content = request.content
        if isinstance(content, list) and content and isinstance(content[0], int) and self._text_only:
            content = as_text(content)
        body = dict(self._common)
        if self._is_chat:
            body["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
        elif isinstance(content, list) and content and isinstance(content[0], dict):
            raise EndpointError("these prompts are chats: use --backend openai-chat")
        else:
            body["prompt"] = content
        if request.max_tokens is not None:
            body["max_tokens"] = request.max_tokens
        return orjson.dumps(body)

    async def send(self, body: bytes, record: Record, start_s: float, itls: Samples) -> None:
        """Send it and fill ``record``, however it ends; the gaps between its chunks go to ``itls``."""
        assert self._session is not None
        clock = time.perf_counter
        record.sent_s = clock() - start_s
        answer = Answer()
        try:
            async with self._session.post(self.url, data=body) as response:
                if response.status != 200:
                    text = (await response.content.read(4096)).decode(errors="replace")
                    record.outcome = Outcome.REFUSED if response.status == REFUSED_STATUS else Outcome.FAILED
                    record.error = f"HTTP {response.status}: {text}"[:MAX_ERROR_CHARS]
                    return
                async for data in response.content.iter_any():
                    answer.feed(data, clock() - start_s)
            record.error = answer.error
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, orjson.JSONDecodeError) as error:
            record.error = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
        finally:
            record.last_s = clock() - start_s
            if not record.error:
                answer.fill(record)
                itls.extend(answer.gaps_s)


class Answer:
    """An SSE stream, fed piece by piece."""

    def __init__(self) -> None:
        self.gaps_s: list[float] = []
        self._failure = ""
        self._is_whole = False
        self._first_text_s: float | None = None
        self._last_text_s = 0.0
        self._last_choice_s = 0.0
        self._usage: dict[str, Any] = {}
        self._rest = b""

    @property
    def error(self) -> str:
        """Empty for a whole answer."""
        if self._failure or self._is_whole:
            return self._failure[:MAX_ERROR_CHARS]
        return "the stream ended without a finish reason or [DONE]"

    def feed(self, data: bytes, now_s: float) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self._is_whole = True
            return
        chunk = orjson.loads(data)
        if (error := chunk.get("error")) is not None:
            self._failure = f"in the stream: {error.get('message', error) if isinstance(error, dict) else error}"
            return
        if usage := chunk.get("usage"):
            self._usage = usage
        for choice in chunk.get("choices") or ():
            self._last_choice_s = now_s
            if _text(choice):
                if self._first_text_s is None:
                    self._first_text_s = now_s
                else:
                    self.gaps_s.append(now_s - self._last_text_s)
                self._last_text_s = now_s
            if choice.get("finish_reason"):
                self._is_whole = True

    def fill(self, record: Record) -> None:
        record.outcome = Outcome.OK
        record.first_text_s = self._first_text_s
        record.last_s = self._last_choice_s or record.last_s
        record.num_chunks = len(self.gaps_s) + (self._first_text_s is not None)
        record.is_counted = "completion_tokens" in self._usage
        record.input_tokens = self._usage.get("prompt_tokens", 0)
        record.output_tokens = self._usage.get("completion_tokens", record.num_chunks)
        record.cached_tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if self.gaps_s:
            record.itl_p99_s = float(np.percentile(self.gaps_s, 99))


def _text(choice: dict[str, Any]) -> Any:
    """Also what a reasoning parser took out of it: those are tokens, too."""
    if delta := choice.get("delta"):
        return (
            delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        )
    return choice.get("text")
