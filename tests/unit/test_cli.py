"""The command line itself: what it says when it cannot do what it was asked."""

from __future__ import annotations

import importlib
import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.text import Text
from typer.testing import CliRunner

from pdserve.cli import app


@pytest.mark.parametrize(
    ("what", "missing", "words"),
    [
        ("serve", "aiohttp", "pip install -e '.[bench]'"),
        ("serve", "bench", "run this from the repository"),
        ("kernels", "triton", "CUDA GPU"),
        ("nothing", "", "there are serve, engines, kernels"),
    ],
)
def test_a_benchmark_that_cannot_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, what: str, missing: str, words: str
) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == missing else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    result = CliRunner().invoke(app, ["bench", what])
    assert result.exit_code == 1
    assert words in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("command", ["up", "gateway", "router", "prefill", "decode", "drain"])
def test_the_sdk_alone_has_no_services(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    find_spec = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name == "structlog" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    result = CliRunner().invoke(app, [command])
    assert result.exit_code == 1
    assert result.output.startswith(f"pdserve: `{command}` needs what the services need: pip install 'pdserve[serve]'")
    assert result.output.count("\n") == 1


MODULES = (
    "gateway.__main__",
    "router.__main__",
    "prefill_service.__main__",
    "decode_service.__main__",
    "worker.drain_command",
    "bench.serve.__main__",
    "bench.plan",
)


def _commands() -> dict[str, Any]:
    """Every command line of the project, by what it is a part of."""
    root: Any = typer.main.get_command(app)
    commands = dict(root.commands)
    for module in MODULES:
        service = typer.Typer()
        service.command()(importlib.import_module(module).main)
        commands[module] = typer.main.get_command(service)
    return commands


@pytest.mark.parametrize("name", sorted(_commands()))
def test_help_texts_hold_no_markup(name: str) -> None:
    """What is in brackets would be taken for a style by the help's renderer, and vanish: it eats "[default: 32]"."""
    texts = [getattr(parameter, "help", None) or "" for parameter in _commands()[name].params]
    assert [text for text in texts if Text.from_markup(text).plain != text] == []


def test_help_says_which_default_a_flag_has_that_is_left_out() -> None:
    output = " ".join(CliRunner().invoke(app, ["up", "--help"], env={"COLUMNS": "400"}).output.split())
    for default in ("1 GiB; GPU: what memory is left", "prefix_aware", "--port + 1", "smollm2-135m-instruct"):
        assert f"[default: ({default})]" in output


def test_the_version_is_told_and_is_the_package_s() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert CliRunner().invoke(app, ["--version"]).output == f"pdserve {project['version']}\n"
