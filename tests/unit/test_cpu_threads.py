"""Engines on one host share its cores: never more threads at work than cores, none idle while one could use it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine import cpu_threads
from engine.cpu_threads import CpuThreads


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "available_cores", lambda: 5)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [1_000_000_000]
    monkeypatch.setattr(cpu_threads.time, "monotonic_ns", lambda: now[0])
    return now


def test_alone_all_cores(tmp_path: Path, clock: list[int]) -> None:
    assert CpuThreads(None, tmp_path).begin_step() == 5


def test_a_fixed_number_stays(tmp_path: Path, clock: list[int]) -> None:
    CpuThreads(None, tmp_path).begin_step()
    assert CpuThreads(3, tmp_path).begin_step() == 3


def test_idle_neighbours_lend_their_cores(tmp_path: Path, clock: list[int]) -> None:
    first, second = CpuThreads(None, tmp_path), CpuThreads(None, tmp_path)
    assert first.begin_step() == 5
    first.end_step()
    clock[0] += cpu_threads._LINGER_NS + 1
    assert second.begin_step() == 5


def test_those_at_work_share_every_core(tmp_path: Path, clock: list[int]) -> None:
    engines = [CpuThreads(None, tmp_path) for _ in range(3)]
    for engine in engines:
        engine.begin_step()
    assert [engine.begin_step() for engine in engines] == [2, 2, 1]
    engines[0].end_step()
    assert [engine.begin_step() for engine in engines[1:]] == [2, 1]  # between two steps, still at work
    clock[0] += cpu_threads._LINGER_NS + 1
    assert [engine.begin_step() for engine in engines[1:]] == [3, 2]


def test_one_with_nothing_to_do_lends_its_cores_at_once(tmp_path: Path, clock: list[int]) -> None:
    first, second = CpuThreads(None, tmp_path), CpuThreads(None, tmp_path)
    first.begin_step()
    first.end_step()
    first.rest()
    assert second.begin_step() == 5


def test_more_engines_than_cores_have_one_thread_each(tmp_path: Path, clock: list[int]) -> None:
    engines = [CpuThreads(None, tmp_path) for _ in range(7)]
    for engine in engines:
        engine.begin_step()
    assert [engine.begin_step() for engine in engines] == [1] * 7


def test_closing_frees_the_slot(tmp_path: Path, clock: list[int]) -> None:
    for _ in range(2 * cpu_threads._NUM_SLOTS):
        engine = CpuThreads(None, tmp_path)
        assert engine.begin_step() == 5
        engine.close()


def test_no_slot_left_still_works(tmp_path: Path, clock: list[int]) -> None:
    engines = [CpuThreads(None, tmp_path) for _ in range(cpu_threads._NUM_SLOTS + 1)]
    assert engines[-1].begin_step() == 5


def test_a_killed_engine_is_forgotten(tmp_path: Path, clock: list[int]) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.cpu_threads import CpuThreads\n"
        "threads = CpuThreads(None, Path(sys.argv[1])); threads._marks[threads._slot] = 1_500_000_000\n"
        "print('at work', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert "at work" in other.stdout.readline()
        mine = CpuThreads(None, tmp_path)
        assert mine.begin_step() == 2  # the other one's slot is the first: it has the odd core
        other.send_signal(signal.SIGKILL)
        other.wait(timeout=10)
    clock[0] = 1_500_000_001
    assert mine.begin_step() == 5
    assert CpuThreads(None, tmp_path)._slot == 0  # its slot was free at once
