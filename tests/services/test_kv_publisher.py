"""A worker's publisher between an engine and a broker that fails, on a clock that jumps."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest

from engine.messages import BlocksCleared, BlocksStored, KVEvents
from tests.services.ownership_world import FakeBroker, VirtualTimeLoop, World
from worker import kv_publisher


def name(value: int) -> bytes:
    return value.to_bytes(16, "little")


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker()


@pytest.fixture
def world(broker: FakeBroker) -> Iterator[World]:
    world = World(broker, VirtualTimeLoop(), num_blocks=100)
    yield world
    world.close()


def published(broker: FakeBroker) -> set[bytes]:
    return set(broker._blocks.get("w", {}))


def test_what_is_cached_is_published(world: World, broker: FakeBroker) -> None:
    worker = world.start_worker("w")
    worker.compute([name(1), name(2)])
    world.run(0.1)
    assert published(broker) == worker.cached == {name(1), name(2)}


def test_many_steps_in_a_moment_are_few_publications(world: World, broker: FakeBroker) -> None:
    worker = world.start_worker("w")
    for value in range(50):
        worker.compute([name(value)])
        world.run(0.001)
    world.run(0.1)
    assert published(broker) == worker.cached
    assert len(broker._streams["w"]) < 15


def test_a_flush_is_noticed_without_any_news(world: World, broker: FakeBroker) -> None:
    worker = world.start_worker("w")
    worker.compute([name(1)])
    world.run(0.1)
    broker.flush()
    world.run(3)
    assert published(broker) == worker.cached


def test_a_lost_answer_is_asked_for_again_without_a_new_beginning(world: World, broker: FakeBroker) -> None:
    worker = world.start_worker("w")
    world.run(0.1)
    broker.fail_after = 3
    worker.compute([name(1)])
    world.run(0.1)
    worker.compute([name(2)])  # more than was sent the first time
    world.run(3)
    assert published(broker) == worker.cached
    assert len(broker._streams["w"]) == 3


def test_a_long_outage_fills_a_bounded_buffer_and_ends_with_a_snapshot(world: World, broker: FakeBroker) -> None:
    with mock.patch.object(kv_publisher, "MAX_BUFFERED_HASHES", 300):
        worker = world.start_worker("w")
        world.run(0.1)
        broker.is_down = True
        for value in range(0, 4000, 4):
            worker.compute([name(value + i) for i in range(4)])
            assert worker.publisher.buffered_hashes <= 300 + 100
            world.run(0.01)
        broker.is_down = False
        world.run(10)
        assert published(broker) == worker.cached
        assert len(worker.cached) == 100


def test_a_newer_incarnation_silences_the_old_one(world: World, broker: FakeBroker) -> None:
    worker = world.start_worker("w")
    worker.compute([name(1)])
    world.run(0.1)
    broker._state["w"] = (worker.incarnation + 1, 7)
    broker._blocks["w"] = {name(9): "device"}
    worker.compute([name(2)])
    world.run(3)
    worker.publisher.take(KVEvents(50, [BlocksCleared(), BlocksStored(b"", [name(3)])]))
    world.run(3)
    assert published(broker) == {name(9)}
    assert worker.publisher.buffered_hashes == 0


def test_the_next_engine_of_the_same_service_begins_anew(world: World, broker: FakeBroker) -> None:
    worker = world.start_worker("w")
    worker.compute([name(1), name(2)])
    world.run(0.1)
    world.restart_engine("w")
    worker.compute([name(5)])
    world.run(0.1)
    assert published(broker) == {name(5)}
    assert broker._state["w"] == (worker.incarnation, 2)
