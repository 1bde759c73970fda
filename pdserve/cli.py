"""The command ``pdserve``. Every command imports what it needs when it runs, so that ``--help`` is quick.

Owns flags and their texts, no behaviour. The services keep their own command lines: ``pdserve router ...`` is
``python -m router ...``.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from pdserve import __version__

app = typer.Typer(
    name="pdserve",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_BENCHES = {"serve": "bench.serve", "engines": "bench.cpu_engines", "kernels": "bench.kernels"}
_BENCH_NEEDS = {
    "serve": ("aiohttp", "pip install -e '.[bench]'"),
    "kernels": ("triton", "it measures a CUDA GPU's kernels, and comes with torch's CUDA build"),
}
_SERVICES_NEED = "structlog"
"""Of what the extra ``serve`` installs the one that every process of ours imports first."""
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _show_version(asked: bool) -> None:
    if asked:
        print(f"pdserve {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version.")
    ] = False,
) -> None:
    """Serve language models with prefill and decode on separate workers."""


@app.command()
def up(
    context: typer.Context,
    prefill: Annotated[int, typer.Option(help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.")] = 1,
    aggregated: Annotated[bool, typer.Option("--aggregated", help="No prefill workers: decode ones do both.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Directory or hub name.", show_default="smollm2-135m-instruct")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Name in the API.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    host: Annotated[str, typer.Option(help="Address of the HTTP API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port of the HTTP API.")] = 8000,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the SDK's gRPC API.", show_default="--port + 1")
    ] = None,
    redis: Annotated[str | None, typer.Option(help="URL of a running Redis.", show_default="start one")] = None,
    policy: Annotated[
        str | None, typer.Option(help="Routing policy of the router.", show_default="prefix_aware")
    ] = None,
    max_queue_s: Annotated[
        float | None,
        typer.Option(help="Refuse (429) what would wait longer to be computed.", show_default="its deadline"),
    ] = None,
    local_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            help="Prompts with fewer uncached tokens are prefilled where they decode; 0: none ever is.",
            show_default="32",
        ),
    ] = None,
    load_format: Annotated[
        str | None, typer.Option(help="auto (safetensors) or dummy: random weights, to measure speed.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Token budget of a step.", show_default="512; GPU: 8192")
    ] = None,
    itl_budget_ms: Annotated[
        float | None,
        typer.Option(
            help="Longest step of a worker that decodes; one with a budget helps busy prefill workers; 0: no limit.",
            show_default="0; decode workers on a GPU: 14",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest prompt + output.", show_default="the model's")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda (spread over the GPUs) or cuda:N.")] = "auto",
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Part of a GPU's memory for all workers on it together.")
    ] = 0.9,
    kv_cache_bytes: Annotated[
        int | None, typer.Option(help="KV pool of each worker.", show_default="1 GiB; GPU: what memory is left")
    ] = None,
    num_threads: Annotated[int | None, typer.Option(help="Threads of each engine.", show_default="they share")] = None,
    transfer: Annotated[
        str | None, typer.Option(help="KV transfer: cuda_ipc, nccl, shm, tcp or ucx.", show_default="the best")
    ] = None,
    start_timeout_s: Annotated[float, typer.Option(help="Give up a start that takes longer.")] = 300.0,
    chat: Annotated[bool, typer.Option(help="One chat when everything is ready.")] = True,
    prompt: Annotated[str, typer.Option(help="Of that chat.")] = "In one sentence, what is a lighthouse?",
    once: Annotated[bool, typer.Option("--once", help="Stop after that chat.")] = False,
    config: Annotated[Path | None, typer.Option(help="YAML file with these settings; flags win.")] = None,
) -> None:
    """Start a whole cluster on this host, ask it something, and keep it running until Ctrl-C."""
    _check_services("up")
    from pdserve.up.errors import UpError
    from pdserve.up.run import up as run_up
    from pdserve.up.settings import load_settings

    given = {
        name: value
        for name, value in context.params.items()
        if name != "config" and (source := context.get_parameter_source(name)) and source.name != "DEFAULT"
    }
    try:
        settings = load_settings(config, given)
    except UpError as error:
        _fail(str(error))
    raise typer.Exit(run_up(settings))


@app.command()
def chat(
    url: Annotated[str, typer.Option(help="Of the HTTP API.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Name in the API.", show_default="the first one served")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.", show_default="the model's own")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer.")] = 512,
) -> None:
    """Talk with a running cluster in the terminal."""
    from pdserve.chat import chat as run_chat

    raise typer.Exit(run_chat(url, model, system, max_tokens))


@app.command()
def trace(
    request_id: Annotated[
        str | None, typer.Argument(help="The x-request-id or the id of the answer.", show_default="list the last ones")
    ] = None,
    url: Annotated[str, typer.Option(help="Of the HTTP API.")] = "http://127.0.0.1:8000",
    slowest: Annotated[bool, typer.Option("--slowest", help="List those that waited longest for a token.")] = False,
) -> None:
    """Draw where one recent request's time went, over all processes; or list the recent requests."""
    from pdserve.trace import list_recent
    from pdserve.trace import trace as run_trace

    raise typer.Exit(list_recent(url, slowest) if request_id is None else run_trace(url, request_id))


@app.command()
def doctor(
    redis: Annotated[str | None, typer.Option(help="URL of a Redis to check.", show_default="our own")] = None,
    port: Annotated[int, typer.Option(help="Port to check for the HTTP API.")] = 8000,
) -> None:
    """Say what this machine has and lacks; exit status 1 when something needed is missing."""
    from pdserve.doctor import doctor as run_doctor

    raise typer.Exit(run_doctor(redis, port))


@app.command(context_settings=_PASS_ON)
def gateway(context: typer.Context) -> None:
    """Run a gateway (its own flags: pdserve gateway --help)."""
    _check_services("gateway")
    _exec("gateway", context.args)


@app.command(context_settings=_PASS_ON)
def router(context: typer.Context) -> None:
    """Run a router (its own flags: pdserve router --help)."""
    _check_services("router")
    _exec("router", context.args)


@app.command(context_settings=_PASS_ON)
def prefill(context: typer.Context) -> None:
    """Run a prefill worker (its own flags: pdserve prefill --help)."""
    _check_services("prefill")
    _exec("prefill_service", context.args)


@app.command(context_settings=_PASS_ON)
def decode(context: typer.Context) -> None:
    """Run a decode worker (its own flags: pdserve decode --help)."""
    _check_services("decode")
    _exec("decode_service", context.args)


@app.command(context_settings=_PASS_ON)
def drain(context: typer.Context) -> None:
    """Let a worker finish and leave (flags: pdserve drain --help)."""
    _check_services("drain")
    _exec("worker.drain_command", context.args)


@app.command(context_settings=_PASS_ON)
def plan(context: typer.Context) -> None:
    """Say what fits on a GPU and how many workers a load needs (flags: pdserve plan --help)."""
    _exec("bench.plan", context.args)


@app.command(context_settings=_PASS_ON)
def bench(context: typer.Context, what: Annotated[str, typer.Argument(help=", ".join(_BENCHES))]) -> None:
    """Measure: `pdserve bench serve --help` is the load generator."""
    if what not in _BENCHES:
        _fail(f"no benchmark {what!r}; there are {', '.join(_BENCHES)}")
    if importlib.util.find_spec("bench") is None:
        _fail("the benchmarks are not installed: run this from the repository, after `pip install -e '.[bench]'`")
    package, remedy = _BENCH_NEEDS.get(what, ("bench", ""))
    if importlib.util.find_spec(package) is None:
        _fail(f"`bench {what}` needs {package}: {remedy}")
    _exec(_BENCHES[what], context.args)


def _check_services(command: str) -> None:
    """The SDK alone, which is what a plain ``pip install pdserve`` gives, has no services."""
    if importlib.util.find_spec(_SERVICES_NEED) is None:
        _fail(f"`{command}` needs what the services need: pip install 'pdserve[serve]', or `make up` in the repository")


def _exec(module: str, args: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


def _fail(message: str) -> NoReturn:
    print(f"pdserve: {message}", file=sys.stderr)
    raise typer.Exit(1)


def main() -> None:
    """Entry point of the ``pdserve`` script."""
    app()


if __name__ == "__main__":
    main()
