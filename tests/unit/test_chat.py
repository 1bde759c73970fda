"""``pdserve chat`` against a small server that speaks just enough of the OpenAI API."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pdserve.chat_client import ChatClient, ChatError
from pdserve.up.plan import free_ports

TIMES = {
    "phases": {"tokenize_s": 0.001, "prefill_s": 0.05, "rest_s": 0.001},
    "ttft_s": 0.052,
    "e2e_s": 0.152,
    "output_tokens": 3,
    "cached_tokens": 0,
    "sent_kv_tokens": 12,
}


class FakeApi(ThreadingHTTPServer):
    """Answers with the number of messages it got, in pieces; ``error`` is sent instead, once, if set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, object]] = []
        self.error: tuple[int, bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: FakeApi

    def do_GET(self) -> None:
        answers: dict[str, object] = {"/v1/models": {"data": [{"id": "tiny"}]}, "/debug/requests/id-1": TIMES}
        self.answer(200 if self.path in answers else 404, json.dumps(answers.get(self.path, {})).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.server.error is not None:
            error, self.server.error = self.server.error, None
            self.answer(*error)
            return
        chunks = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [
            {"choices": [{"delta": {"content": text}}]} for text in ("You said ", str(len(body["messages"])), ".")
        ]
        chunks += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": {}}]
        events = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        self.answer(200, "".join(events).encode())

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("x-request-id", "id-1")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join(timeout=10)


async def collect(client: ChatClient) -> str:
    return "".join(
        [text async for text in client.stream("tiny", [{"role": "user", "content": "Hi"}], 5, temperature=0)]
    )


async def test_pieces_id_and_times(api: FakeApi) -> None:
    async with ChatClient(api.url + "/") as client:
        assert await client.model() == "tiny"
        assert await collect(client) == "You said 1."
        assert client.request_id == "id-1"
        assert await client.times(client.request_id) == TIMES
    assert api.bodies[0]["temperature"] == 0
    assert api.bodies[0]["stream"] is True


@pytest.mark.parametrize(
    ("status", "body", "message", "retryable"),
    [
        (503, b'{"error": {"message": "no workers"}}', r"no workers \(HTTP 503\)", True),
        (400, b'{"error": {"message": "too long"}}', r"too long \(HTTP 400\)", False),
        (502, b"<html>", r"<html> \(HTTP 502\)", False),
        (200, b'data: {"error": {"message": "worker lost"}}\n\n', "worker lost", False),
    ],
)
async def test_errors_say_what_the_server_says(
    api: FakeApi, status: int, body: bytes, message: str, retryable: bool
) -> None:
    api.error = status, body
    async with ChatClient(api.url) as client:
        with pytest.raises(ChatError, match=message) as caught:
            await collect(client)
    assert caught.value.retryable is retryable


async def test_no_server_is_one_line() -> None:
    (port,) = free_ports(1)
    async with ChatClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ChatError, match=r"no answer from .*: is `pdserve up` running\?") as caught:
            await collect(client)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "http://127.0.0.1:99999", "http://", "ftp://127.0.0.1", "http://[::1"]
)
def test_what_is_no_url_is_one_line(url: str) -> None:
    """Also with a model given, when nothing is asked of the server before the first question."""
    with pytest.raises(ChatError, match="use --url http://HOST:PORT"):
        ChatClient(url)
    argv = [sys.executable, "-m", "pdserve.cli", "chat", "--url", url, "--model", "tiny"]
    result = subprocess.run(argv, input="one\n", capture_output=True, text=True, timeout=60, check=False)
    assert "use --url http://HOST:PORT" in result.stdout
    assert "Traceback" not in result.stderr


def run_chat(api: FakeApi, typed: str) -> str:
    argv = [sys.executable, "-m", "pdserve.cli", "chat", "--url", api.url]
    result = subprocess.run(argv, input=typed, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_conversation_remembers_resets_and_shows_its_times(api: FakeApi) -> None:
    output = run_chat(api, "/stats\none\ntwo\n/reset\nthree\n/stats\n/nonsense\n/quit\nnever sent\n")
    assert "Nothing was asked yet." in output
    assert [len(body["messages"]) for body in api.bodies] == [1, 3, 1]  # type: ignore[arg-type]
    assert "You said 3." in output
    assert "Time to the first token: 52.0 ms" in output
    assert output.count("/reset  forget") == 2


def test_a_failed_question_is_not_remembered(api: FakeApi) -> None:
    api.error = 400, b'{"error": {"message": "too long"}}'
    output = run_chat(api, "one\ntwo\n")
    assert "too long (HTTP 400)" in output
    assert [len(body["messages"]) for body in api.bodies] == [1, 1]  # type: ignore[arg-type]


def test_an_error_with_brackets_is_shown_as_it_is(api: FakeApi) -> None:
    api.error = 400, b'{"error": {"message": "messages[0] has [/b] and [red]"}}'
    output = run_chat(api, "one\ntwo\n")
    assert "messages[0] has [/b] and [red] (HTTP 400)" in output
    assert "You said 1." in output, "the conversation goes on"


async def test_an_id_is_one_part_of_the_path(api: FakeApi) -> None:
    async with ChatClient(api.url) as client:
        with pytest.raises(ChatError, match="404"):
            await client.times("id-1?x#y")
