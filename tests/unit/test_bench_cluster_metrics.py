"""What bench.cluster_metrics tells of two looks at the services."""

from __future__ import annotations

from bench.cluster_metrics import changed


def test_counters_are_told_as_what_was_added_and_gauges_as_they_are() -> None:
    before = {"decode-0": {"a_steps_total": 5.0, "a_aim": 0.75, "b_total": 1.0}}
    after = {
        "decode-0": {"a_steps_total": 7.0, "a_aim": 0.5, "b_total": 9.0, "a_kind_total{x}": 2.0},
        "router": {"a_steps_total": 3.0, "a_same_total": 0.0},
        "prefill-0": {"b_total": 1.0},
    }
    # A service that was not there before counted from nothing; what did not change is not told.
    assert changed(before, after, ("a_",)) == {
        "decode-0": {"a_steps_total": 2.0, "a_aim": 0.5, "a_kind_total{x}": 2.0},
        "router": {"a_steps_total": 3.0},
        "prefill-0": {},
    }
    assert changed(after, after, ("a_steps",))["decode-0"] == {}
