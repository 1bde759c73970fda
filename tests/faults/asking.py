"""One request as a client makes it, and exactly how it ended: every byte of a stream is judged.

Shapes: ``stream`` (SSE), ``whole`` (one JSON answer), ``sdk`` (the SDK's gRPC stream, which tries again by itself).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import pdserve
from pdserve.errors import PdserveError, RequestCancelledError

SHAPES = ("stream", "whole", "sdk")
LOSS = frozenset({"worker_lost", "handoff_failed", "no_workers", "router_unavailable"})
"""Codes of an error that may be right when somebody is gone, and nobody could take over in time: 503, try again."""
GRACE_S = 5.0
"""A client waits for so long after its deadline before it counts the request as hung."""


@dataclass
class Outcome:
    """How a request ended for its client."""

    kind: str = "hung"
    """answer | error | lost (the connection broke) | gone (the client left) | hung (no end within the deadline)"""
    token_ids: list[int] = field(default_factory=list)
    """What came, also before an error."""
    code: str = ""
    message: str = ""
    status: int = 0
    retry_after: str | None = None
    terminals: int = 0
    """Terminal events: finish reasons and errors."""
    elapsed_s: float = 0.0

    @property
    def told(self) -> str:
        """With what the error says."""
        return f"{self}: {self.message}" if self.kind == "error" else str(self)

    def __str__(self) -> str:
        return f"{self.kind}{f' {self.code}' if self.code else ''}"


class Asking:
    """A running request: started by the constructor, on its own thread."""

    def __init__(
        self,
        http_port: int,
        grpc_port: int,
        prompt: list[int],
        max_tokens: int,
        *,
        shape: str = "stream",
        timeout_s: float = 25.0,
        cache_salt: str = "",
    ) -> None:
        """``cache_salt``: empty makes one, so that nothing of the prompt is cached for it."""
        self.timeout_s = timeout_s
        self.outcome = Outcome()
        self.num_tokens = 0
        """So far."""
        self._http_port, self._grpc_port = http_port, grpc_port
        self.max_tokens = max_tokens
        self.shape = shape
        self._prompt = prompt
        self._salt = cache_salt or uuid.uuid4().hex
        self._left = threading.Event()
        self._connection: http.client.HTTPConnection | None = None
        self._stream: pdserve.Stream | None = None
        self._started_s = time.monotonic()
        run = self._run_sdk if shape == "sdk" else self._run_http
        self._thread = threading.Thread(target=self._run, args=(run, shape), daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def leave(self) -> None:
        """Disconnect, or cancel where the protocol has a word for it."""
        self._left.set()
        if self._stream is not None:
            self._stream.cancel()
        elif self._connection is not None and self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def wait(self) -> Outcome:
        """Its end, or ``hung``."""
        left_s = self._started_s + self.timeout_s + GRACE_S - time.monotonic()
        self._thread.join(max(0.1, left_s))
        if self._thread.is_alive():
            self.leave()
            return Outcome(kind="hung", elapsed_s=time.monotonic() - self._started_s)
        return self.outcome

    def _run(self, run: Any, shape: str) -> None:
        try:
            run(shape)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.outcome.kind, self.outcome.message = "lost", f"{type(error).__name__}: {error}"
        if self._left.is_set():
            self.outcome.kind = "gone"
        self.outcome.elapsed_s = time.monotonic() - self._started_s

    def _run_http(self, shape: str) -> None:
        body = {"model": "test-model", "prompt": self._prompt, "temperature": 0, "max_tokens": self.max_tokens}
        body |= {"return_token_ids": True, "cache_salt": self._salt, "stream": shape == "stream"}
        timeout_s = self.timeout_s + GRACE_S
        self._connection = connection = http.client.HTTPConnection("127.0.0.1", self._http_port, timeout=timeout_s)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json", "x-request-timeout-s": str(self.timeout_s)}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            self.outcome.status = response.status
            self.outcome.retry_after = response.headers.get("retry-after")
            if response.status != 200:
                self._fail(json.loads(response.read()))
            elif shape == "whole":
                self._take(json.loads(response.read()))
            else:
                self._read_events(response)

    def _read_events(self, response: http.client.HTTPResponse) -> None:
        done = False
        while line := response.readline():
            text = line.decode().strip()
            if not text:
                continue
            assert text.startswith("data: "), text
            if done:
                raise ValueError(f"after [DONE] came {text!r}")
            data = text.removeprefix("data: ")
            if data == "[DONE]":
                done = True
            elif "error" in (event := json.loads(data)):
                self._fail(event)
            else:
                self._take(event)
        if not self.outcome.terminals:
            raise ValueError("the stream ended without a terminal event")
        if self.outcome.kind == "answer" and not done:
            raise ValueError("the stream ended without [DONE]")

    def _run_sdk(self, shape: str) -> None:
        address = f"127.0.0.1:{self._grpc_port}"
        with pdserve.Client(address, deadline_s=self.timeout_s) as client:
            try:
                self._stream = client.stream(
                    self._prompt, max_tokens=self.max_tokens, temperature=0, cache_salt=self._salt
                )
                for chunk in self._stream:
                    self._tokens(chunk.token_ids)
                    if chunk.finish_reason is not None:
                        self._end("answer")
            except RequestCancelledError:
                self._end("gone")
            except PdserveError as error:
                self.outcome.code = error.code or type(error).__name__
                self.outcome.message = error.message
                self._end("error")

    def _take(self, payload: dict[str, Any]) -> None:
        for choice in payload["choices"]:
            self._tokens(choice["token_ids"] or ())
            if choice["finish_reason"] is not None:
                self._end("answer")

    def _fail(self, payload: dict[str, Any]) -> None:
        self.outcome.code = payload["error"]["code"] or ""
        self.outcome.message = payload["error"]["message"]
        self._end("error")

    def _tokens(self, token_ids: Any) -> None:
        if token_ids and self.outcome.terminals:
            raise ValueError("tokens came after the terminal event")
        self.outcome.token_ids.extend(token_ids)
        self.num_tokens = len(self.outcome.token_ids)

    def _end(self, kind: str) -> None:
        self.outcome.kind = kind
        self.outcome.terminals += 1
