"""Flags and YAML of ``pdserve up``: the same names, the same defaults, and mistakes that are named."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.up.errors import UpError
from pdserve.up.settings import UpSettings, load_settings


def test_flags_and_settings_have_the_same_names_and_defaults() -> None:
    flags = {name: each.default for name, each in inspect.signature(cli.up).parameters.items()}
    for own in ("context", "config"):
        del flags[own]
    assert flags == {field.name: field.default for field in dataclasses.fields(UpSettings)}


def test_yaml_with_flags_on_top(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("prefill: 2\nserved-model-name: mine\nstart_timeout_s: 20\nport: 9000\nmax_queue_s: 5\n")
    settings = load_settings(path, {"port": 9001})
    assert (settings.prefill, settings.served_model_name, settings.start_timeout_s, settings.port) == (
        2,
        "mine",
        20,
        9001,
    )
    assert settings.max_queue_s == 5
    assert settings.num_engines == 3
    assert load_settings(None, {"aggregated": True}).num_engines == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("prefil: 2", "unknown key 'prefil'; known are prefill, decode"),
        ("prefill: two", "prefill must be int, not 'two'"),
        ("prefill: true", "prefill must be int, not True"),
        ("aggregated: 1", "aggregated must be bool, not 1"),
        ("model: 7", r"model must be str \| None, not 7"),
        ("- prefill", "must hold"),
        ("a: [", "is not YAML"),
        ("prefill: 0", "prefill=0"),
        ("port: 70000", "port=70000"),
        ("redis: localhost", "redis='localhost' is not a URL"),
        ("once: true\nchat: false", "do nothing"),
        ("aggregated: true\nprefill: 2", "leave one of them out"),
        ("start_timeout_s: 0", "--start-timeout-s"),
        ("start_timeout_s: .inf", "--start-timeout-s"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    with pytest.raises(UpError, match=named) as caught:
        load_settings(path, {})
    assert "\n" not in str(caught.value)


def test_the_command_says_it_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("prefil: 2")
    command = [sys.executable, "-m", "pdserve.cli", "up", "--config", str(tmp_path / "cluster.yaml")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("pdserve: ")
    assert result.stderr.count("\n") == 1


def test_help_does_not_import_what_commands_need() -> None:
    heavy = "{'torch', 'grpc', 'httpx', 'transformers', 'psutil'}"
    code = f"import pdserve.cli, sys; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
