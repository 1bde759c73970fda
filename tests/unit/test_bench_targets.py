"""The table of targets: which figure is compared with which goal, and what becomes of a part that fails."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from typer.testing import CliRunner

from bench import gpu_engine, gpu_handoff, gpu_serve, gpu_transfer, target_lines
from bench.apart import Figures
from bench.goals import Goal, is_met
from bench.target_lines import Line, table
from bench.targets import PARTS, Part, Ran, main, report, run


def as_read(raw: Any) -> Any:
    """As it is after the file."""
    return json.loads(json.dumps(raw))


def test_times_are_met_from_below_and_rates_from_above() -> None:
    assert [is_met("ms", ours, 10.0) for ours in (9.0, 10.0, 11.0)] == [True, True, False]
    assert [is_met("tok/s", ours, 10.0) for ours in (9.0, 10.0, 11.0)] == [False, True, True]
    assert is_met("x TTFT", 1.2, 1.3)
    assert not is_met("x", 1.2, 1.3)
    assert is_met("ms", 1.0, None) is None


def test_table() -> None:
    lines = [
        Line("a", "ms", 4.25, Goal(5.0, 3.5, 4.1)),
        Line("b", "GB/s", 300.0, Goal(None, 390.5, 290.0)),
        Line("c", "s", 1),
    ]
    assert table(lines).splitlines() == [
        "| work | ours | peer | limit | target | unit |  |",
        "| --- | ---: | ---: | ---: | ---: | --- | --- |",
        "| a | 4.25 | 5 | 3.5 | 4.1 | ms | missed |",
        "| b | 300 | - | 390.5 | 290 | GB/s | met |",
        "| c | 1 | - | - | - | s |  |",
    ]


def test_engine_rows_keep_their_goals() -> None:
    rows = [
        gpu_engine.Row("decode b=1", "ms", 4.0, Goal(5.0, 3.5, 4.1), [4.0]),
        gpu_engine.Row("device waits", "%", 0.1),
    ]
    assert target_lines.gpu_engine(as_read([asdict(row) for row in rows])) == [
        Line("decode b=1", "ms", 4.0, Goal(5.0, 3.5, 4.1)),
        Line("device waits", "%", 0.1),
    ]


def test_transfers_are_measured_by_the_copy_of_the_same_place() -> None:
    rates = [
        gpu_transfer.Rate("one GPU", "16 MiB", "plain copy", 1400.0),
        gpu_transfer.Rate("cuda_ipc, one GPU", "16 MiB", "moved", 70.0),
        gpu_transfer.Rate("two GPUs", "1 MiB", "plain copy", 50.0),
        gpu_transfer.Rate("two GPUs", "16 MiB", "plain copy", 300.0),
        gpu_transfer.Rate("cuda_ipc, two GPUs", "1 MiB", "moved", 5.0),
        gpu_transfer.Rate("cuda_ipc, two GPUs", "16 MiB", "moved", 280.0),
        gpu_transfer.Rate("cuda_ipc, two GPUs", "16 MiB", "packed and verified", 250.0),
    ]
    one, small, large = target_lines.gpu_transfer(as_read([asdict(rate) for rate in rates]))
    assert one.goal == Goal(None, 1400.0, None)
    assert small.goal == Goal(44.0, 50.0, None)  # the target begins at 16 MiB
    assert large.goal == Goal(288.0, 300.0, 270.0)
    assert large.cells()[-1] == "met"


def test_handoffs_are_parts_of_the_time_to_the_first_token() -> None:
    figure = gpu_handoff.HandoffFigure("cuda_ipc, two GPUs", 8192, 200.0, 210.0, 4.2, 100.0)
    [line] = target_lines.gpu_handoff(as_read([asdict(figure)]))
    assert line.ours == pytest.approx(2.0)
    assert (line.goal.target, line.cells()[-1]) == (1.0, "missed")


def served(cluster: str, load: str, ttft: float, itl: float) -> gpu_serve.Row:
    figures = dict.fromkeys(gpu_serve.Row.__dataclass_fields__, 0.0)
    figures |= {"ttft_p50": ttft, "ttft_p99": 2 * ttft, "itl_p99": itl, "share_steady": 0.95}
    return gpu_serve.Row(**{**figures, "cluster": cluster, "load": load})  # type: ignore[arg-type]


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_pair_is_compared_with_one_gpu_at_half_of_the_rate(gpus: int) -> None:
    rows = [
        served("aggregated", "2048 -> 256, 16/s", 64.0, 35.0),
        served("apart@4096", "2048 -> 256, 16/s", 120.0, 10.0),
        served("apart@4096", "azure at 50%, 9.1/s", 120.0, 10.0),
    ]
    raw = gpu_serve.Measured("llama-3.1-8b", gpus, "", {"aggregated": 12.0}, {}, rows)
    lines = {line.work: line for line in target_lines.gpu_serve(as_read(asdict(raw)))}
    itl = lines["apart@4096, 2048 -> 256, 16/s: p99 ITL"].goal
    ttft = lines["apart@4096, 2048 -> 256, 16/s: median TTFT"].goal
    if gpus == 2:  # vLLM's row of 8/s
        assert (itl, ttft) == (Goal(52.8, None, 15.0), Goal(103, None, 128.75))
    else:  # its row of 16/s, and no target
        assert (itl, ttft) == (Goal(126.9, None, None), Goal(413, None, None))
    assert lines["aggregated, 2048 -> 256, 16/s: p99 ITL"].goal.target is None
    assert lines["apart@4096, azure at 50%, 9.1/s: p99 ITL"].goal == Goal()
    cut = lines["apart@4096, 2048 -> 256, 16/s: p99 ITL, aggregated / apart"]
    assert (cut.ours, cut.goal.target) == (3.5, 10.0 if gpus == 2 else None)
    assert "apart@4096, azure at 50%, 9.1/s: p99 ITL, aggregated / apart" not in lines
    assert lines["aggregated: ready"].goal.target == 30


def test_lines_of_the_cpu() -> None:
    engines = [
        {"engine": "pdserve", "weights": "float32", "streams": 16, "output_tokens_per_s": 240.0},
        {"engine": "vllm", "weights": "float32", "streams": 16, "error": "not installed"},
        {"engine": "transformers", "weights": "float32", "streams": 16, "output_tokens_per_s": 80.0},
    ]
    assert [line.goal.target for line in target_lines.cpu_engines(engines)] == [231, None]
    raw = {"memcpy, one process": {"64 KiB": 40.0, "1 MiB": 50.0, "16 MiB": 17.0, "128 MiB": 17.0}}
    raw["tcp, bytes only"] = dict.fromkeys(raw["memcpy, one process"], 3.5)
    assert [line.cells()[-1] for line in target_lines.cpu_transfer(raw)] == ["met", "missed", "missed", "met"]
    assert [line.goal.limit for line in target_lines.cpu_transfer(raw)] == [40.0, 50.0, 17.0, 17.0]
    apart = {"aggregated": Figures(400.0, 0.1, {}), "shm": Figures(340.0, 0.12, {})}
    lines = target_lines.cpu_apart(as_read({name: asdict(figures) for name, figures in apart.items()}))
    assert [(line.unit, line.cells()[-1]) for line in lines] == [("x", "met"), ("x TTFT", "met")]


def test_parts_have_a_name_and_a_limit() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert part.limit_s > 0
        assert ("OUTPUT" in part.arguments.split()) == (part.lines is not None)


def test_a_part_leaves_its_json_and_its_lines(tmp_path: Path) -> None:
    source = tmp_path / "rows.json"
    source.write_text(json.dumps([asdict(gpu_engine.Row("decode", "ms", 2.0, Goal(3.0, 1.0, 2.5)))]))
    part = Part("engine", f"json.tool {source} OUTPUT", target_lines.gpu_engine, 20, gpus=0)
    ran = run(part, 0, None, "")
    assert (ran.state, ran.tail, ran.lines) == ("ok", "", [Line("decode", "ms", 2.0, Goal(3.0, 1.0, 2.5))])
    assert "1 of 1 targets met" in report([ran])
    part = Part("other", f"json.tool {source} OUTPUT", target_lines.cpu_service, 20, gpus=0)
    assert run(part, 0, None, "").why.startswith("its JSON is not as expected")


def test_what_was_measured_before_is_read(tmp_path: Path) -> None:
    rows = tmp_path / "llama.json"
    rows.write_text(json.dumps([asdict(gpu_engine.Row("decode", "ms", 2.0, Goal(3.0, 1.0, 1.5)))]))
    done = CliRunner().invoke(app(), ["--read", f"llama={rows}"])
    assert "| decode | 2 | 3 | 1 | 1.5 | ms | missed |" in done.output
    for wrong in (f"check={rows}", f"llama={tmp_path}/none", f"lama={rows}"):
        assert CliRunner().invoke(app(), ["--read", wrong]).exit_code == 2


def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


def test_failed_late_and_impossible_parts_say_so(tmp_path: Path) -> None:
    failed = run(Part("a", f"json.tool {tmp_path}/none OUTPUT", target_lines.kernels, 20, gpus=0), 0, None, "")
    late = run(Part("b", "timeit -n1 -r1 __import__('time').sleep(60)", None, 20, gpus=0), 0, 1.0, "")
    skipped = run(Part("c", "bench.kernels --output OUTPUT", target_lines.kernels, 20), 0, None, "")
    assert [ran.state for ran in (failed, late, skipped)] == ["failed", "too long", "skipped"]
    assert "No such file" in failed.tail
    text = report([failed, late, skipped])
    assert "b: too long: no end within 1 s" in text
    assert "c: skipped: needs 1 CUDA device(s), there are 0" in text
    assert "the last of what a printed" in text


def test_nothing_of_a_late_part_is_left(tmp_path: Path) -> None:
    """Nor of what it had started."""
    script, pid_file = tmp_path / "starts_another.py", tmp_path / "child"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    assert (
        run(Part("d", f"timeit -n1 -r1 exec(open('{script}').read())", None, 20, gpus=0), 0, 6.0, "").state
        == "too long"
    )
    child = int(pid_file.read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_report_without_figures_has_no_table() -> None:
    assert report([Ran("check")]) == ""
