"""Whatever is lost, repeated or reordered, whoever restarts, whenever Redis is flushed or away: when it is quiet again,
every router's index is the union of the workers' caches; until then it is only less warm."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.block_hash import hash_tokens, root_hash
from registry import ownership
from router import ownership_feed
from tests.services.ownership_world import Broker, FakeBroker, ValkeyBroker, VirtualTimeLoop, World
from tests.services.processes import REDIS_SERVERS, running_redis
from worker import kv_publisher

WORKERS = st.sampled_from(["w0", "w1", "w2"])
BLOCK_TOKENS = {"w0": 1, "w1": 2, "w2": 1}
"""w1's blocks are two units long."""
PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
PAUSES = st.sampled_from([0.0, 0.003, 0.02, 0.3])


def prompt(numbers: list[int]) -> list[bytes]:
    return hash_tokens(numbers, 1, root_hash("model"))


class OwnershipMachine(RuleBasedStateMachine):
    quiet_s = 12.0
    pause_scale = 1.0

    def make_world(self) -> World:
        return World(FakeBroker(), VirtualTimeLoop())

    @initialize()
    def begin(self) -> None:
        self.world = self.make_world()
        for worker_id, block_tokens in BLOCK_TOKENS.items():
            self.world.start_worker(worker_id, block_tokens)
        self.world.start_router()
        self.world.start_router()

    @rule(worker_id=WORKERS, numbers=PROMPTS, pause_s=PAUSES)
    def compute(self, worker_id: str, numbers: list[int], pause_s: float) -> None:
        worker = self.world.workers.get(worker_id)
        if worker is not None:
            worker.compute(prompt(numbers)[worker.block_tokens - 1 :: worker.block_tokens])
        self.world.run(pause_s * self.pause_scale)

    @rule(worker_id=WORKERS, numbers=PROMPTS, how=st.sampled_from(["lose", "repeat", "swap", "trim"]), pause_s=PAUSES)
    def compute_and_tamper(self, worker_id: str, numbers: list[int], how: str, pause_s: float) -> None:
        """What it says is in the stream, and nobody has read it yet."""
        self.compute(worker_id, numbers, 0.02 / self.pause_scale)
        self.world.broker.change_stream(worker_id, how)
        self.world.run(pause_s * self.pause_scale)

    @rule(worker_id=WORKERS, numbers=PROMPTS, pause_s=st.sampled_from([0.02, 0.3, 3.0]))
    def compute_while_redis_is_away(self, worker_id: str, numbers: list[int], pause_s: float) -> None:
        self.world.broker.is_down = True
        self.compute(worker_id, numbers, pause_s)
        self.world.broker.is_down = False

    @rule(worker_id=WORKERS)
    def restart_engine(self, worker_id: str) -> None:
        if worker_id in self.world.workers:
            self.world.restart_engine(worker_id)

    @rule(worker_id=WORKERS, pause_s=PAUSES)
    def kill_or_start_worker(self, worker_id: str, pause_s: float) -> None:
        if worker_id in self.world.workers:
            self.world.kill_worker(worker_id)
        else:
            self.world.start_worker(worker_id, BLOCK_TOKENS[worker_id])
        self.world.run(pause_s * self.pause_scale)

    @rule(number=st.integers(0, 1), pause_s=PAUSES)
    def restart_router(self, number: int, pause_s: float) -> None:
        self.world.restart_router(number)
        self.world.run(pause_s * self.pause_scale)

    @rule(pause_s=PAUSES)
    def flush(self, pause_s: float) -> None:
        self.world.broker.flush()
        self.world.run(pause_s * self.pause_scale)

    @precondition(lambda self: isinstance(getattr(self, "world", None) and self.world.broker, FakeBroker))
    @rule(count=st.integers(1, 2))
    def lose_answers(self, count: int) -> None:
        assert isinstance(self.world.broker, FakeBroker)
        self.world.broker.fail_after = count

    @rule(numbers=PROMPTS, worker_id=WORKERS)
    def route(self, numbers: list[int], worker_id: str) -> None:
        """Only workers that are known are named, and never with more than there is."""
        hashes = prompt(numbers)
        for router in self.world.routers:
            for owner, units in router.index.match(hashes).items():
                assert owner in router.index.worker_ids()
                assert 0 < units <= len(hashes)
                assert units % BLOCK_TOKENS[owner] == 0
            router.index.guess(hashes, 0, worker_id, BLOCK_TOKENS[worker_id])

    @rule()
    def be_quiet(self) -> None:
        self.world.broker.is_down = False
        if isinstance(self.world.broker, FakeBroker):
            self.world.broker.fail_after = 0
        self.world.run(self.quiet_s)
        self.world.check_settled()
        for router in self.world.routers:
            assert not router.index.sweep()
            for worker in self.world.workers.values():  # guesses are forgotten
                for name in worker.cached:
                    assert name in router.index.blocks_of(worker.worker_id)
            router.index.check_invariants()

    @invariant()
    def always(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            try:
                self.be_quiet()
            finally:
                self.world.close()


SETTINGS = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


def test_the_index_becomes_the_union_of_the_caches() -> None:
    run_state_machine_as_test(OwnershipMachine, settings=SETTINGS)


@pytest.fixture
def quick() -> Iterator[None]:
    """The same in a tenth of the time, for a broker that runs in real time."""
    with ExitStack() as stack:
        for module, name, value in (
            (kv_publisher, "RENEW_S", 0.1),
            (kv_publisher, "RETRY_S", 0.05),
            (kv_publisher, "SNAPSHOT_WAIT_S", 0.3),
            (ownership_feed, "CHECK_INTERVAL_S", 0.1),
            (ownership_feed, "RETRY_S", 0.05),
            (ownership, "BLOCK_MS", 20),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@pytest.mark.parametrize("kind", sorted(REDIS_SERVERS))
def test_the_same_with_a_real_server(tmp_path: Path, quick: None, kind: str) -> None:
    with running_redis(tmp_path, kind) as server:

        class ValkeyMachine(OwnershipMachine):
            quiet_s = 1.5
            pause_scale = 0.2

            def make_world(self) -> World:
                broker: Broker = ValkeyBroker(server.url)
                broker.flush()
                return World(broker, asyncio.new_event_loop())

        run_state_machine_as_test(ValkeyMachine, settings=settings(SETTINGS, max_examples=3, stateful_step_count=25))
