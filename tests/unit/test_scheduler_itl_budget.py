"""The scheduler under an ITL budget: steps that decode are short, prompts get on, hand-offs do not wait for them."""

from __future__ import annotations

from collections.abc import Callable

from engine.batch import SampledBatch, ScheduledBatch
from engine.config import EngineConfig
from engine.core import EngineCore
from engine.itl_budget import MIN_TOKENS
from tests.unit.fake_async_runner import FakeAsyncRunner, LaunchedStep
from tests.unit.fake_runner import FakeRunner, make_core, make_message, oracle
from tests.unit.handoff_link import Clock, Link, receive_kv
from tests.unit.leaks import assert_no_leak, check_books

MAX_LEN = 2000


class TimedRunner(FakeRunner):
    """Each token takes a millisecond of the clock."""

    clock: Clock
    step_s = 0.0
    """What a step takes besides."""

    def run(self, batch: ScheduledBatch, on_layers: Callable[[int, int], None] | None = None) -> SampledBatch:
        self.clock.now_s += self.step_s + 1e-3 * batch.num_tokens
        return super().run(batch, on_layers)


def timed_core(itl_budget_ms: float, num_blocks: int = 1024, step_s: float = 0.0) -> EngineCore:
    config = EngineConfig(
        model="fake", block_size=4, hash_block_tokens=2, max_num_batched_tokens=256, itl_budget_ms=itl_budget_ms
    )
    clock = Clock()
    runner = TimedRunner(config, num_blocks=num_blocks, max_model_len=MAX_LEN)
    runner.clock, runner.step_s = clock, step_s
    return EngineCore(config, runner, clock=clock)


def chunks(core: EngineCore, request_id: str, others: bool) -> list[int]:
    """Prompt tokens of each step that it had together with others, or alone."""
    assert isinstance(core.runner, FakeRunner)
    steps = [batch for batch in core.runner.batches if (len(batch) > 1) is others]
    return [tokens for batch in steps for name, _, tokens in batch if name == request_id and tokens > 1]


def run(core: EngineCore, max_steps: int = 2000) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not core.has_work():
            return tokens
        for output in core.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        check_books(core)
    raise AssertionError("it does not end")


def run_two_and_a_long_prompt(core: EngineCore) -> None:
    """ "a" and "b" decode while "long" is read; all of them say what the oracle does."""
    messages = [make_message(name, [1, 2], 60, ignore_eos=True) for name in ("a", "b")]
    messages.append(make_message("long", [n % 50 for n in range(1900)], 3, ignore_eos=True))
    for message in messages:
        core.add(message)
    tokens = run(core)
    for message in messages:
        assert tokens[message.request_id] == oracle(message, MAX_LEN)[0]


def test_a_step_that_decodes_stays_within_the_budget() -> None:
    core = timed_core(itl_budget_ms=100)
    run_two_and_a_long_prompt(core)
    beside = chunks(core, "long", others=True)[1:]  # in the first step nobody decodes
    assert beside[0] <= 2 * MIN_TOKENS  # nothing is known yet
    assert max(beside) <= 98
    assert max(beside[8:]) >= 70
    assert_no_leak(core)


class PaddingRunner(FakeAsyncRunner):
    """Each row takes a millisecond, and rows are padded."""

    clock: Clock

    def execute(self, step: LaunchedStep) -> None:
        rows = sum(item.end - item.start for item in step.items)
        self.clock.now_s += 1e-3 * next(size for size in self.padded_rows if size >= rows)
        super().execute(step)


def test_prompt_tokens_fill_the_rows_that_a_device_computes_in_any_case() -> None:
    config = EngineConfig(
        model="fake", block_size=4, hash_block_tokens=2, max_num_batched_tokens=256, itl_budget_ms=120
    )
    clock = Clock()
    runner = PaddingRunner(config, num_blocks=1024, max_model_len=MAX_LEN, padded_rows=(1, 2, 3, 48, 96, 144, 256))
    runner.clock = clock
    core = EngineCore(config, runner, clock=clock)
    run_two_and_a_long_prompt(core)
    beside = [sum(tokens for *_, tokens in batch) for batch in runner.batches if len(batch) == 3 and batch[-1][2] > 1]
    assert set(beside[5:-2]) <= {48, 96}
    assert beside[5:-2].count(96) > 3 * beside[5:-2].count(48)
    assert_no_leak(core)


def test_without_decodes_a_step_takes_all_that_it_can() -> None:
    core = timed_core(itl_budget_ms=20)
    core.add(make_message("long", [n % 50 for n in range(1000)], 2, ignore_eos=True))
    run(core)
    assert chunks(core, "long", others=False)[:3] == [256, 256, 256]
    assert_no_leak(core)


def test_decodes_over_the_budget_starve_no_prompt() -> None:
    core = timed_core(itl_budget_ms=0.5)
    messages = [make_message(name, [1, 2], 60, ignore_eos=True) for name in ("a", "b")]
    messages.append(make_message("long", [n % 50 for n in range(640)], 3, ignore_eos=True))
    for message in messages:
        core.add(message)
        core.step()
    assert not core.stats().shares_prefill
    tokens = run(core)
    for message in messages:
        assert tokens[message.request_id]
    beside = chunks(core, "long", others=True)
    assert all(MIN_TOKENS <= tokens <= 2 * MIN_TOKENS for tokens in beside[:-1])
    assert_no_leak(core)


def test_a_prompt_that_waits_gets_more_of_steps_that_are_too_long_anyway() -> None:
    """A step with two decodes takes 202 ms, whatever the budget: a third of one with prompt tokens is 101 of these."""
    core = timed_core(itl_budget_ms=20, step_s=0.2)
    for name in ("a", "b"):
        core.add(make_message(name, [1, 2], 60, ignore_eos=True))
    for _ in range(20):
        core.step()
    message = make_message("long", [n % 50 for n in range(1900)], 3, ignore_eos=True)
    core.add(message)
    assert run(core)["long"] == oracle(message, MAX_LEN)[0]
    beside = chunks(core, "long", others=True)
    assert beside[0] == MIN_TOKENS
    assert 90 <= max(beside) <= 111, "10 % for what it has to learn"
    assert_no_leak(core)


def test_who_is_preempted_has_waited_since_then() -> None:
    core = timed_core(itl_budget_ms=20, num_blocks=80, step_s=0.2)
    messages = [make_message(f"r{k}", [n * k % 50 for n in range(64)], 120, ignore_eos=True) for k in range(3)]
    for message in messages:
        core.add(message)
    tokens: dict[str, list[int]] = {message.request_id: [] for message in messages}
    preempted_s: dict[str, float] = {}
    while core.has_work():
        begins_s = core._clock()
        for output in core.step().outputs:
            tokens[output.request_id] += output.token_ids
        for request in core.scheduler.preempted:
            since_s = preempted_s.setdefault(request.request_id, request.waits_since_s)
            assert since_s == request.waits_since_s
            if since_s > begins_s:
                assert begins_s - request.arrival_s > 5
    assert preempted_s
    assert tokens == {message.request_id: oracle(message, MAX_LEN)[0] for message in messages}
    assert_no_leak(core)


def test_without_a_budget_nothing_is_limited_and_nothing_offered() -> None:
    core = make_core(num_blocks=64, max_num_batched_tokens=128)
    core.add(make_message("a", [1, 2], 8, ignore_eos=True))
    core.step()
    core.add(make_message("long", [n % 50 for n in range(60)], 2, ignore_eos=True))
    core.step()
    assert chunks(core, "long", others=True) == [60]
    assert not core.stats().shares_prefill
    run(core)
    assert_no_leak(core)


def test_it_says_how_fast_it_computes_prompts_beside_its_decodes() -> None:
    core = timed_core(itl_budget_ms=100)
    assert core.stats().shares_prefill
    assert core.stats().prefill_tokens_per_s == 0  # not known yet
    core.add(make_message("a", [1, 2], 60, ignore_eos=True))
    core.step()
    core.add(make_message("long", [n % 50 for n in range(1900)], 3, ignore_eos=True))
    for _ in range(20):
        core.step()
    # A thousand a second, less what the decode takes.
    assert 900 <= core.stats().prefill_tokens_per_s <= 1000
    run(core)
    assert_no_leak(core)


def test_decodes_that_are_about_to_come_count() -> None:
    core = make_core(num_blocks=64, max_num_batched_tokens=128, itl_budget_ms=40)
    Link(make_core(), core)
    core.add(make_message("coming", [1, 2, 3], 4, handoff=receive_kv()))
    assert core.reserve_kv("coming") == 0
    core.add(make_message("long", [n % 50 for n in range(60)], 2, ignore_eos=True))
    core.step()
    assert chunks(core, "long", others=False) == [MIN_TOKENS]
    core.abort(["coming"], "client")
    run(core)
    assert_no_leak(core)


def test_kv_may_come_while_prompts_that_came_before_wait_for_their_turn() -> None:
    """As long as there is room for all of them: here, 16 blocks, of which the two prompts will need 4 each."""
    core = make_core(num_blocks=16, max_num_batched_tokens=4)
    Link(make_core(), core)
    for name, first in (("running", 10), ("waiting", 30)):
        core.add(make_message(name, range(first, first + 12), 2, ignore_eos=True))
    core.step()
    assert (core.stats().running, core.stats().waiting) == (1, 1)
    for name in ("coming", "too much"):
        core.add(make_message(name, [7 + len(name), *range(16)], 4, handoff=receive_kv()))
    assert core.reserve_kv("coming") == 0
    assert core.reserve_kv("too much") is None
    core.abort(["coming", "too much"], "client")
    run(core)
    assert_no_leak(core)
