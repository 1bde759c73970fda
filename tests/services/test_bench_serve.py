"""``bench serve`` as a process against a server of the test's own: what it sends, and how it counts what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from typer.testing import CliRunner, Result

from bench.serve.__main__ import main

Answer = Callable[[web.Request, dict[str, Any], int], Any]


@dataclass
class FakeServer:
    """An OpenAI endpoint. ``answer`` decides what each request gets; ``bodies`` is what was sent."""

    answer: Answer
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_open: int = 0
    peak_open: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.paths.append(request.path)
        self.num_open += 1
        self.peak_open = max(self.peak_open, self.num_open)
        try:
            response: web.StreamResponse = await self.answer(request, body, len(self.bodies) - 1)
            return response
        finally:
            self.num_open -= 1

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "served"}]})


async def tokens(request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
    """As many tokens as asked for, and the usage."""
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    is_chat = "messages" in body
    count = body.get("max_tokens", 3)
    for i in range(count):
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if i == count - 1 else None}
        choice |= {"delta": {"content": "x"}} if is_chat else {"text": "x"}
        await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        await asyncio.sleep(0.001)
    prompt = body.get("prompt", "")
    usage = {"prompt_tokens": len(prompt) if isinstance(prompt, list) else 1, "completion_tokens": count}
    await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n")
    return response


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    server = FakeServer(tokens)
    app = web.Application()
    app.router.add_post("/v1/completions", server.handle)
    app.router.add_post("/v1/chat/completions", server.handle)
    app.router.add_get("/v1/models", server.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    yield server
    await runner.cleanup()


async def bench(*flags: str) -> Result:
    import typer

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    return await asyncio.to_thread(CliRunner().invoke, app, [*flags, "--no-progress"])


async def measured(server: FakeServer, path: Path, *flags: str) -> dict[str, Any]:
    flags = ("--base-url", server.url, "--result-dir", str(path), "--result-filename", "r.json", *flags)
    result = await bench(*flags, "--save-detailed")
    assert result.exit_code == 0, result.output
    data: dict[str, Any] = json.loads((path / "r.json").read_text())
    return data


async def test_random_over_completions(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--num-prompts", "20", "--random-input-len", "30", "--random-output-len", "5", "--max-concurrency", "4")
    data = await measured(server, tmp_path, *flags)
    assert (data["completed"], data["refused"], data["failed"]) == (20, 0, 0)
    assert (data["total_input_tokens"], data["total_output_tokens"]) == (600, 100)
    assert data["model_id"] == "served"
    assert 1 <= server.peak_open <= 4
    assert data["peak_open_requests"] <= 4
    warm_up, *bodies = server.bodies
    assert warm_up["max_tokens"] < 5
    assert {len(body["prompt"]) for body in bodies} == {30}
    assert len({tuple(body["prompt"]) for body in bodies}) == 20
    for body in bodies:
        assert body["stream_options"] == {"include_usage": True}
        assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("served", 5, True, 0.0)
    assert [request["num_chunks"] for request in data["requests"]] == [5] * 20
    for request in data["requests"]:
        assert request["sent_s"] <= request["first_text_s"] <= request["last_s"] <= data["duration"]
    assert data["mean_ttft_ms"] <= data["p99_ttft_ms"] <= data["p99_e2el_ms"]


async def test_chat_with_prompts_of_a_file(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "system", "content": "s"}]}\n{"prompt": "hi", "output_tokens": 2}\n')
    flags = ("--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "4")
    data = await measured(server, tmp_path, *flags, "--custom-output-len", "7", "--extra-body", '{"top_k": 5}')
    assert set(server.paths) == {"/v1/chat/completions"}
    messages = [body["messages"] for body in server.bodies[1:]]
    assert (
        messages.count([{"role": "system", "content": "s"}]) == messages.count([{"role": "user", "content": "hi"}]) == 2
    )
    assert sorted(body["max_tokens"] for body in server.bodies[1:]) == [2, 2, 7, 7]
    assert all("ignore_eos" not in body and body["top_k"] == 5 for body in server.bodies)
    assert data["total_output_tokens"] == 18


async def test_refused_and_failed_are_told_apart(server: FakeServer, tmp_path: Path) -> None:
    async def answer(request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
        if number == 0 or number % 5 == 0:
            return await tokens(request, body, number)
        if number % 5 == 1:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"retry-after": "1"})
        if number % 5 == 2:
            return web.json_response({"error": {"message": "broken"}}, status=500)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        if number % 5 == 3:
            await response.write(b'data: {"error": {"message": "worker lost"}}\n\n')
        return response

    server.answer = answer
    data = await measured(
        server, tmp_path, "--num-prompts", "25", "--random-input-len", "4", "--random-output-len", "3"
    )
    assert (data["completed"], data["refused"], data["failed"]) == (5, 5, 15)
    assert data["total_output_tokens"] == 15
    counts = {error.partition(":")[0]: count for error, count in data["errors"].items()}
    assert counts == {
        "HTTP 429": 5,
        "HTTP 500": 5,
        "in the stream": 5,
        "the stream ended without a finish reason or [DONE]": 5,
    }


async def test_several_rates_and_plots(server: FakeServer, tmp_path: Path) -> None:
    flags = ("--base-url", server.url, "--num-prompts", "10", "--random-input-len", "6", "--random-output-len", "2")
    flags += ("--request-rate", "200,400", "--goodput", "ttft:60000", "--result-dir", str(tmp_path))
    result = await bench(*flags, "--result-filename", "r.json", "--plot", str(tmp_path / "p.png"))
    assert result.exit_code == 0, result.output
    assert result.output.count("Serving Benchmark Result") == 2
    for rate in (200, 400):
        data = json.loads((tmp_path / f"r-{rate}qps.json").read_text())
        assert data["request_rate"] == rate
        assert data["request_goodput"] == pytest.approx(data["request_throughput"])
        assert (tmp_path / f"p-{rate}qps.png").exists()
    assert (tmp_path / "p-rates.png").exists()
    prompts = [tuple(body["prompt"]) for body in server.bodies[1:]]
    assert len(set(prompts)) == 20, "the second run's prompts are not those that the first one left in the cache"


async def test_trace_replay(server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 200, "input_length": 1536, "output_length": 9, "hash_ids": [0, 1, 2]},
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    flags = ("--dataset-name", "mooncake", "--dataset-path", str(path), "--trace-block-tokens", "16")
    data = await measured(server, tmp_path, *flags, "--max-output-tokens", "4", "--time-stretch", "2")
    first, second = (body["prompt"] for body in server.bodies[1:])
    assert second[:32] == first
    assert len(second) == 48
    assert data["request_rate"] == "trace"
    assert data["duration"] >= 0.4
    assert data["total_output_tokens"] == 7


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--base-url", "http://127.0.0.1:9"), "is the server up"),
        (("--dataset-name", "nothing"), "prefix_repetition"),
        (("--dataset-name", "mooncake"), "--dataset-path"),
        (("--goodput", "ttft"), "ttft:MS"),
        (("--backend", "grpc"), "openai-chat"),
        (("--request-rate", "0"), "--request-rate"),
        (("--extra-body", "[]"), "JSON object"),
        (("--num-prompts", "0"), "--num-prompts"),
    ],
)
async def test_what_is_wrong_is_said(flags: tuple[str, ...], words: str) -> None:
    result = await bench(*flags)
    assert result.exit_code == 1
    assert words in result.output


async def test_an_endpoint_that_refuses_everything(server: FakeServer) -> None:
    async def answer(request: web.Request, body: dict[str, Any], number: int) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such model"}}, status=404)

    server.answer = answer
    result = await bench("--base-url", server.url, "--num-prompts", "50")
    assert result.exit_code == 1
    assert "no such model" in result.output
    assert len(server.bodies) == 1, "it does not try fifty times"
