"""A chat over the OpenAI API, as the terminal uses it: streamed text, the request's id, and where its time went.

Used by ``pdserve up`` (the first chat) and ``pdserve chat``. Whoever builds an application uses the ``openai`` package.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 120.0


class ChatError(Exception):
    """The server answered with an error, or not at all. ``retryable``: the same may work in a moment."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class ChatClient:
    """One server. Use as an async context manager."""

    def __init__(self, url: str) -> None:
        """Raises: ChatError."""
        if not _is_url(url):
            raise ChatError(f"{url!r} is not the URL of a gateway: use --url http://HOST:PORT")
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(timeout=httpx.Timeout(_READ_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S))
        self.request_id = ""
        """Of the last chat, as the server named it."""

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def model(self) -> str:
        """The name of the model that the server serves.

        Raises: ChatError.
        """
        return str((await self._get("/v1/models"))["data"][0]["id"])

    async def times(self, request_id: str) -> dict[str, Any]:
        """Where the time of a request went (see ``up.timing``), by its x-request-id or its answer's id.

        Raises: ChatError.
        """
        return await self._get(f"/debug/requests/{quote(request_id, safe='')}")

    async def recent(self) -> list[dict[str, Any]]:
        """The requests that the gateway remembers, newest first.

        Raises: ChatError.
        """
        return list((await self._get("/debug/requests"))["requests"])

    async def stream(
        self, model: str, messages: list[dict[str, str]], max_tokens: int, **options: float
    ) -> AsyncIterator[str]:
        """Pieces of the answer as they come. ``options``: temperature and the like; else the model's defaults.

        Raises: ChatError.
        """
        body = {"model": model, "messages": messages, "max_tokens": max_tokens, "stream": True, **options}
        try:
            async with self._http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                self.request_id = response.headers.get("x-request-id", "")
                if response.status_code != 200:
                    raise _error_of(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        for text in _texts_of(json.loads(line.removeprefix("data: "))):
                            yield text
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            response = await self._http.get(f"{self.url}{path}")
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if response.status_code != 200:
            raise _error_of(response.status_code, response.content)
        return dict(response.json())

    def _unreachable(self, error: httpx.HTTPError) -> ChatError:
        return ChatError(f"no answer from {self.url} ({error or type(error).__name__}): is `pdserve up` running?")


def _is_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no port, no IPv6 address
        return False


def _texts_of(chunk: dict[str, Any]) -> list[str]:
    if "error" in chunk:
        raise ChatError(str(chunk["error"].get("message", chunk["error"])))
    texts = [choice.get("delta", {}).get("content") for choice in chunk.get("choices", [])]
    return [text for text in texts if text]


def _error_of(status: int, body: bytes) -> ChatError:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:200] or "no explanation"
    return ChatError(f"{message} (HTTP {status})", retryable=status in (429, 503))
