"""The phases of a request's first token add up, and only so many records are kept."""

from __future__ import annotations

import pytest

from gateway.records import RecentRequests, RequestRecord
from pdserve.v1 import inference_pb2 as pb
from telemetry.metrics import PHASES


def record() -> RequestRecord:
    made = RequestRecord("id", "/v1/completions", received_s=100.0)
    made.tokenize_s = 0.01
    made.dispatched_s = 100.02
    made.first_output_s = 100.5
    made.worker_phases = pb.Phases(
        route_s=0.03,
        prefill_queue_s=0.1,
        handoff_wait_s=0.02,
        prefill_s=0.2,
        transfer_s=0.05,
        worker_s=0.4,
        router_s=0.44,
    )
    return made


def test_phases_add_up() -> None:
    phases = record().phases()
    assert {name.removesuffix("_s") for name in phases} == set(PHASES)
    assert phases["relay_s"] == pytest.approx(0.48 - 0.03 - 0.4)
    assert sum(phases.values()) == pytest.approx(0.5)
    # 0.01 in the gateway before dispatch, and what the worker did not account for
    assert phases["rest_s"] == pytest.approx(0.01 + (0.4 - 0.37))


def test_no_phases_before_the_first_output() -> None:
    made = record()
    made.first_output_s = None
    assert made.phases() == {}
    assert made.view()["ttft_s"] is None


def test_only_the_last_are_kept() -> None:
    recent = RecentRequests(3)
    for i in range(5):
        recent.add(RequestRecord(str(i), "x"))
    recent.add(RequestRecord("2", "again"))
    recent.add(RequestRecord("9", "x"))
    assert [key for key in map(str, range(10)) if recent.get(key)] == ["2", "4", "9"]
    found = recent.get("2")
    assert found is not None
    assert found.endpoint == "again"
