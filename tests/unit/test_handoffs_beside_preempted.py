"""D accepts hand-offs while preempted requests catch up, and neither harms the other. At random, with made-up senders.

Each sender asks again and again; when it has its reservation its KV comes some steps later, or is lost once before.
The laws: whoever came back draws a token before it is preempted again, though the blocks of a reservation cannot be
taken back; the victim is the youngest of the others; all end, and every output is the oracle's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core import EngineCore
from engine.messages import AddRequest, RequestOutput, Timings
from engine.request import Request
from tests.unit.fake_async_runner import make_async_core
from tests.unit.fake_runner import VOCAB, make_core, make_message, oracle
from tests.unit.handoff_link import Clock, Link, receive_kv
from tests.unit.leaks import assert_no_leak, check_books
from tests.unit.test_preemption_random import SHAPES


class Witness:
    """Stands at ``Scheduler._preempt`` and objects."""

    def __init__(self, core: EngineCore) -> None:
        self.scheduler = core.scheduler
        self.num_tokens: dict[str, int] = {}
        """When last preempted."""
        self._really: Callable[[Request], None] = core.scheduler._preempt
        core.scheduler._preempt = self  # type: ignore[method-assign]

    def got_on(self, request: Request) -> bool:
        """Since it was preempted, if it was."""
        return request.num_tokens > self.num_tokens.get(request.request_id, 0)

    def __call__(self, request: Request) -> None:
        assert self.got_on(request), "it came back, and was preempted before it got on"
        younger = [other for other in self.scheduler.running if other.order > request.order]
        assert not any(map(self.got_on, younger)), "a younger one was spared"
        assert len(self.scheduler.running) > 1 or self.scheduler.reservations.num_seats, "alone it has room"
        self.num_tokens[request.request_id] = request.num_tokens
        self._really(request)


class Coming(NamedTuple):
    steps: int
    cached_tokens: int


class Senders:
    """Of the requests that wait for KV: who asks, and what is on its way."""

    def __init__(self, core: EngineCore, transfer_steps: int, are_lost: int = 0) -> None:
        """``are_lost``: so many of the transfers, the first ones; they are tried again."""
        self.core = core
        self.transfer_steps = transfer_steps
        self.are_lost = are_lost
        self.messages: dict[str, AddRequest] = {}
        self.coming: dict[str, Coming] = {}
        Link(make_core(), core)  # its end at D; what is to be sent, nobody asks

    def add(self, message: AddRequest) -> None:
        self.messages[message.request_id] = message
        sampling = message.sampling
        self.core.add(
            make_message(
                message.request_id,
                message.prompt_token_ids,
                sampling.max_tokens,
                handoff=receive_kv(),
                ignore_eos=sampling.ignore_eos,
            )
        )

    def ask(self) -> None:
        for request_id in self.messages:
            if request_id not in self.coming:
                cached_tokens = self.core.reserve_kv(request_id)
                if cached_tokens is not None:
                    self.coming[request_id] = Coming(self.transfer_steps, cached_tokens)

    def bring(self) -> None:
        for request_id, (steps, cached_tokens) in list(self.coming.items()):
            if steps:
                self.coming[request_id] = Coming(steps - 1, cached_tokens)
                continue
            del self.coming[request_id]
            if self.are_lost:
                self.are_lost -= 1
                self.core.release_reservation(request_id)
                continue
            message = self.messages.pop(request_id)
            tokens, num_layers = message.prompt_token_ids, self.core.runner.kv_cache.num_layers
            if cached_tokens < len(tokens):
                payload = tokens[cached_tokens:] * num_layers
                self.core.write_kv(request_id, cached_tokens, len(tokens), 0, num_layers, payload, None)
            first = RequestOutput(request_id=request_id, token_ids=oracle(message, 64)[0][:1], timings=Timings())
            self.core.kv_ready(request_id, first)


def run(core: EngineCore, senders: Senders, added: list[tuple[AddRequest, bool, int]]) -> dict[str, list[int]]:
    """``added``: each request, whether its KV comes from elsewhere, and the steps before the next one is added.

    What each of them gets."""
    tokens: dict[str, list[int]] = {message.request_id: [] for message, _, _ in added}
    waiting, pause = list(added), 0
    work = sum(len(m.prompt_token_ids) + m.sampling.max_tokens + gap for m, _, gap in added)
    steps = 4 * work + 2 * (len(added) + senders.are_lost) * (senders.transfer_steps + 1)
    for _ in range(steps):
        if waiting and pause == 0:
            message, comes_from_elsewhere, pause = waiting.pop(0)
            (senders.add if comes_from_elsewhere else core.add)(message)
        pause = max(0, pause - 1)
        senders.ask()
        check_books(core)
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
        check_books(core)
        senders.bring()
        if not waiting and not senders.messages and not core.has_work():
            return tokens
    raise AssertionError(f"not over after {steps} steps")


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([make_core, make_async_core]))
def test_neither_harms_the_other(data: st.DataObject, make: Callable[..., EngineCore]) -> None:
    shape = data.draw(SHAPES)
    shared = data.draw(st.booleans())
    added = []
    for index in range(data.draw(st.integers(2, 8))):
        prompt = [(3 * i + (0 if shared else index)) % VOCAB for i in range(data.draw(st.integers(1, 16)))]
        message = make_message(f"r{index}", prompt, data.draw(st.integers(2, 20)), ignore_eos=True)
        added.append((message, data.draw(st.booleans()), data.draw(st.integers(0, 4))))
    longest = max(len(message.prompt_token_ids) + message.sampling.max_tokens for message, _, _ in added)
    num_blocks = -(-longest // shape["block_size"]) + data.draw(st.integers(1, 6))
    core = make(num_blocks=num_blocks, max_model_len=64, clock=Clock(), **shape)
    Witness(core)
    senders = Senders(core, data.draw(st.integers(0, 20)), data.draw(st.integers(0, 2)))
    assert run(core, senders, added) == {message.request_id: oracle(message, 64)[0] for message, _, _ in added}
    assert_no_leak(core)


@pytest.mark.parametrize("make", [make_core, make_async_core])
def test_an_older_request_whose_kv_comes_does_not_set_back_who_came_back(make: Callable[..., EngineCore]) -> None:
    """``back`` comes back while ``oldest`` has but one block, of a pool that is too small for both; then its KV comes
    and it grows, three blocks more than there are until ``back`` has caught up."""
    shape = {"block_size": 2, "max_num_batched_tokens": 3, "max_num_seqs": 3, "enable_prefix_caching": False}
    core = make(num_blocks=14, clock=Clock(), **shape)
    witness, senders = Witness(core), Senders(core, transfer_steps=1000)
    oldest, back = make_message("oldest", [1], 20, ignore_eos=True), make_message("back", range(20), 4, ignore_eos=True)
    senders.add(oldest)
    senders.ask()
    core.add(make_message("other", [2, 3], 9, ignore_eos=True))
    core.add(back)
    tokens: dict[str, list[int]] = {"oldest": [], "other": [], "back": []}
    for _ in range(200):
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
        if witness.num_tokens and not core.scheduler.preempted and senders.coming:
            senders.coming["oldest"] = Coming(0, 0)
            senders.bring()
        if not core.has_work():
            break
    assert "back" in witness.num_tokens
    assert (tokens["oldest"], tokens["back"]) == (oracle(oldest, 64)[0], oracle(back, 64)[0])
    assert_no_leak(core)


@pytest.mark.parametrize("make", [make_core, make_async_core])
def test_what_fits_is_accepted_while_a_preempted_request_catches_up(make: Callable[..., EngineCore]) -> None:
    """Its way back takes ten steps of two tokens; three quarters of the pool are free meanwhile."""
    core = make(num_blocks=20, max_num_batched_tokens=3, enable_prefix_caching=False)
    senders = Senders(core, transfer_steps=1)
    for name, first in (("older", 10), ("younger", 30)):
        core.add(make_message(name, range(first, first + 20), 40, ignore_eos=True))
    while not core.scheduler.preempted:
        core.step()
    victim = core.scheduler.preempted.head()
    core.abort([other for other in ("older", "younger") if other != victim.request_id], "client")
    while core.scheduler.preempted:
        core.step()
    senders.add(make_message("coming", range(8), 4, ignore_eos=True))
    senders.ask()
    assert "coming" in senders.coming
    assert victim.num_computed_tokens < victim.num_tokens - 1, "it was accepted before it had caught up"
    core.abort(["coming", victim.request_id], "test")
    while core.has_work():
        core.step()
    assert_no_leak(core)


@pytest.mark.parametrize(("make", "num_blocks", "older_tokens"), [(make_core, 19, 8), (make_async_core, 18, 3)])
def test_a_hand_off_leaves_what_others_grow_by_until_who_came_back_has_caught_up(
    make: Callable[..., EngineCore], num_blocks: int, older_tokens: int
) -> None:
    """Its five blocks are there, but ``older`` needs some of them before, and they could not be taken back."""
    core = make(num_blocks=num_blocks, max_num_batched_tokens=3, enable_prefix_caching=False, clock=Clock())
    witness, senders = Witness(core), Senders(core, transfer_steps=1000)
    for name, prompt in (("older", range(older_tokens)), ("other", range(10, 30)), ("back", range(30, 50))):
        core.add(make_message(name, prompt, 36, ignore_eos=True))
    while not core.scheduler.preempted:
        core.step()
    back = core.scheduler.preempted.head()
    assert back.request_id == "back"
    core.abort(["other"], "client")
    while core.scheduler.preempted:
        core.step()
    senders.add(make_message("coming", range(18), 4, ignore_eos=True))
    while back.num_computed_tokens < 20:
        assert "older" in (request.request_id for request in core.scheduler.running), "it was set back"
        senders.ask()
        core.step()
    assert list(witness.num_tokens) == ["back"]


@pytest.mark.parametrize("make", [make_core, make_async_core])
def test_hand_offs_that_never_cease_do_not_starve_a_preempted_request(make: Callable[..., EngineCore]) -> None:
    """Four senders, each with a new prompt as soon as it has no other; the request needs half of the pool."""
    core = make(num_blocks=12, enable_prefix_caching=False, clock=Clock())
    witness, senders = Witness(core), Senders(core, transfer_steps=2)
    core.add(make_message("older", range(4), 32, ignore_eos=True))
    large = make_message("large", range(20), 20, ignore_eos=True)
    core.add(large)
    got: list[int] = []
    made = 0
    for _ in range(1000):
        if "large" in witness.num_tokens and len(core.scheduler.waiting_for_kv) < 4:
            senders.add(make_message(f"small{made}", [made % VOCAB] * 6, 6, ignore_eos=True))
            made += 1
        senders.ask()
        got += [token for output in core.step().outputs if output.request_id == "large" for token in output.token_ids]
        senders.bring()
        if "large" not in core.scheduler.requests:
            break
    assert got == oracle(large, 64)[0]
    assert made > 4, "they went on"
