"""``python -m tests.faults.soak``: random faults under load, each schedule from its seed; ``make soak``.

    --seed N      only this one                 --first N --count M   so many from N on (default 1,000 from 0)
    --seconds S   begin no new one after that   --results FILE        JSON lines, one a schedule, appended

A schedule is up to three faults at different places and at random moments, whose effects may overlap, and six requests
of random shapes that begin at random moments, so that the faults meet them in any state. Judged as a cell of the
matrix is; what may be answered is what any of its faults allows.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdserve.model_store import prepare_default_model
from tests.faults.asking import SHAPES, Asking
from tests.faults.cells import Result, Runner
from tests.faults.fleet import running_fleet
from tests.faults.injections import BY_KIND, FAULTS, Context, ends
from tests.faults.reference import reference

SPAN_S = 5.0
"""In which requests and faults begin."""
NUM_REQUESTS = 6
TIMEOUT_S = 40.0


@dataclass(frozen=True)
class Planned:
    at_s: float
    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.at_s:.1f}s {self.kind}@{self.place}"


@dataclass(frozen=True)
class Schedule:
    seed: int
    faults: tuple[Planned, ...]
    requests: tuple[tuple[float, str], ...]
    """When it is asked, and in which shape."""

    def __str__(self) -> str:
        return f"seed {self.seed}: " + ", ".join(map(str, self.faults))


def schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    kinds = [fault for fault in FAULTS if fault.kind not in ("deadline", "pools_full")]
    faults: dict[str, Planned] = {}
    for _ in range(rng.randint(1, 3)):
        fault = rng.choice(kinds)
        place = rng.choice(fault.places)
        # One fault for each role and for each link: a process cannot be killed and stopped at once.
        faults.setdefault(place.removesuffix("_engine"), Planned(rng.uniform(0.3, SPAN_S), fault.kind, place))
    requests = sorted((rng.uniform(0, SPAN_S), rng.choice(SHAPES)) for _ in range(NUM_REQUESTS))
    return Schedule(seed, tuple(sorted(faults.values(), key=lambda planned: planned.at_s)), tuple(requests))


def run(runner: Runner, plan: Schedule, prompt: list[int], max_tokens: int) -> Result:
    """The schedule's timeline: requests begin, faults come and are healed, then everything is judged."""
    fleet = runner.fleet
    result = Result(str(plan), reached=True)
    asked: list[Asking] = []
    left: set[int] = set()
    rng = random.Random(plan.seed + 1)

    def ask(shape: str) -> Callable[[], None]:
        # Half of them share a salt, and with it whatever is cached by then.
        salt = f"soak {plan.seed}" if rng.random() < 0.5 else ""
        return lambda: asked.append(fleet.ask(prompt, max_tokens, shape=shape, timeout_s=TIMEOUT_S, cache_salt=salt))

    timeline: list[tuple[float, int, Callable[[], None]]] = []
    for at_s, shape in plan.requests:
        timeline.append((at_s, len(timeline), ask(shape)))
    for planned in plan.faults:
        fault = BY_KIND[planned.kind]
        context = Context(fleet, None, prompt, planned.place)

        def inject(fault=fault, context=context) -> None:  # type: ignore[no-untyped-def]
            if fault.must_fail:
                open_ones = [i for i, asking in enumerate(asked) if not asking.is_over]
                if not open_ones:
                    return
                victim = rng.choice(open_ones)
                left.add(victim)
                context.asking = asked[victim]
            fault.inject(context)

        timeline.append((planned.at_s, len(timeline), inject))
        timeline.append((planned.at_s + fault.hold_s, len(timeline), lambda f=fault, c=context: f.heal(c)))
    started_s = time.monotonic()
    try:
        for at_s, _, act in sorted(timeline):
            time.sleep(max(0.0, started_s + at_s - time.monotonic()))
            act()
        for i, asking in enumerate(asked):
            right = frozenset({"answer"})
            for planned in plan.faults:
                fault = BY_KIND[planned.kind]
                if not fault.must_fail:
                    right |= ends(fault, planned.place, asking.shape)
            outcome = asking.wait()
            result.ended.append(outcome.told)
            result.problems += runner.judge(outcome, right | {"gone"} if i in left else right, asking)
        runner.check_recovery(result.problems)
    except Exception as error:  # a failed schedule, and the next one is run
        result.problems.append(f"{type(error).__name__}: {error}")
    finally:
        fleet.untreat_all()
    result.seconds = round(time.monotonic() - started_s, 1)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.soak")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    seeds = (
        [arguments.seed] if arguments.seed is not None else range(arguments.first, arguments.first + arguments.count)
    )
    model = prepare_default_model()
    failed = done = 0
    started_s = time.monotonic()
    with running_fleet(Path(tempfile.mkdtemp(prefix="pdserve-faults-")), str(model)) as fleet:
        answers = reference(model)
        runner = Runner(fleet, answers)
        runner.warm_up()
        for seed in seeds:
            if time.monotonic() - started_s > arguments.seconds:
                break
            result = run(runner, schedule(seed), answers.prompt, len(answers.answer))
            done += 1
            failed += bool(result.problems)
            line = f"{result.verdict:7} {result.seconds:5.1f} s  {result.cell}: {', '.join(result.ended)}"
            print("\n    ".join([line, *result.problems]), flush=True)
            if arguments.results:
                with arguments.results.open("a") as file:
                    file.write(json.dumps(result.as_json()) + "\n")
    print(f"{done} schedules in {time.monotonic() - started_s:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
