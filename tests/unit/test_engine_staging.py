"""How much staging an engine on a GPU makes; the GPU is played."""

from __future__ import annotations

import pytest

from kv_transfer import cuda
from kv_transfer.backends.mapped import MappedSettings
from kv_transfer.backends.socket_channel import SocketSettings
from kv_transfer.engine_staging import DEVICE_SLOT_BYTES, MIN_DEVICE_SLOTS, EngineStaging
from kv_transfer.staging import SlotPool


@pytest.mark.parametrize(("full_slots", "num_slots"), [(0, MIN_DEVICE_SLOTS), (100, 100), (1000, 256)])
def test_no_more_slots_than_a_channel_queues(full_slots: int, num_slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more, a receiver that is slow for a moment would fail transfers, which should wait for a slot instead."""
    monkeypatch.setattr(cuda, "CudaRuntime", lambda device: device)
    monkeypatch.setattr(cuda, "CudaStaging", lambda runtime, count, size: SlotPool(count, size))
    arena = EngineStaging("cuda", full_slots * DEVICE_SLOT_BYTES).arena("device")
    assert arena.num_slots == num_slots
    assert arena.num_slots <= MappedSettings().max_queued_segments
    assert arena.num_slots <= SocketSettings().max_queued_segments
