"""The decode engine's hand-off where a device unpacks: what it may still write when blocks change hands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decode_service import engine_main
from pdserve.v1 import kv_pb2
from tests.unit.fake_runner import make_core, make_message
from tests.unit.handoff_link import receive_kv


class Copies:
    """Counts how often what is launched next was put behind the copies that were asked for."""

    joins = 0

    def join(self) -> None:
        self.joins += 1


@pytest.fixture
def copies() -> Copies:
    return Copies()


@pytest.fixture
def handoff(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> engine_main.DecodeHandoff:
    monkeypatch.setattr(engine_main, "load_all", lambda *_: {})
    core = make_core()
    process: Any = SimpleNamespace(wakeup=lambda: None, send=lambda _: None)
    cache: Any = SimpleNamespace(copies=copies)
    me = kv_pb2.WorkerIdentity(worker_id="d", incarnation=1)
    core.receiver = handoff = engine_main.DecodeHandoff(process, core, cache, me, kv_pb2.KVLayout(), "", "", "")
    core.add(make_message("r", [1, 2, 3], handoff=receive_kv()))
    assert handoff.reserve("r") == 0
    return handoff


def test_the_next_attempt_writes_into_kept_blocks_after_the_one_before(
    handoff: engine_main.DecodeHandoff, copies: Copies
) -> None:
    assert handoff.keep("r")
    assert copies.joins == 1


def test_blocks_are_freed_after_what_was_unpacked_into_them(handoff: engine_main.DecodeHandoff, copies: Copies) -> None:
    handoff.release("r")
    assert copies.joins == 1
