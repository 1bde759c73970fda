"""Requests of all kinds to an engine on a device that computes nothing: which kernels do they launch that its start did
not compile ahead? The first such requests would wait for them. On Hopper there are none. The prefill kernel of other
architectures has forms for short prompts, too, and the rarer ones are left to their first launch.

    python -m tests.kernels.offline_requests [--arch 120]

Prints one line for each engine, and exits with 1 when there is such a kernel.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from engine.messages import AddRequest, SamplingParams
from tests.kernels.offline_gpu import SHARED_BYTES
from tests.kernels.offline_start import engine, serve

_WINDOWED = {
    "use_sliding_window": True,
    "sliding_window": 128,
    "num_hidden_layers": 6,
    "layer_types": ["full_attention", "sliding_attention"] * 3,
}
ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("llama-3.1-8b", {}),
    ("qwen3-0.6b", {"max_num_seqs": 40, "max_num_batched_tokens": 500, "block_size": 16, "shape": _WINDOWED}),
]
_ids = itertools.count()
_random = np.random.default_rng(1)


def _request(length: int, max_tokens: int, head: Sequence[int] = (), **sampling: Any) -> AddRequest:
    number = next(_ids)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=number, **sampling)
    prompt = [*head, *_random.integers(0, 1000, length).tolist()]
    return AddRequest(request_id=f"{number}", prompt_token_ids=prompt, sampling=params, timeout_s=600.0)


def waves() -> Iterator[list[AddRequest]]:
    for count in (1, 2, 3, 9, 17, 33, 40, 70, 130, 300, 600, 1024):
        yield [_request(30, 3) for _ in range(count)]
    # Of different lengths: steps that decode and prefill, with any number of decodes before the prefills.
    for count in (5, 20, 200):
        yield [_request(int(_random.integers(1, 1500)), int(_random.integers(1, 30))) for _ in range(count)]
    yield [_request(9000, 3), _request(3, 3), _request(700, 40)]
    for sampling in ({"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_k": 20}):
        for count in (1, 9, 100):
            yield [_request(30, 3, **sampling) for _ in range(count)]
    yield [_request(30, 4, frequency_penalty=0.5, logprobs=2), _request(60, 4, repetition_penalty=1.2, min_tokens=2)]
    head = _random.integers(0, 1000, 4096).tolist()
    for count in (1, 2, 5, 24, 80, 300):
        yield [_request(64, 4, head) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, default=90, choices=SHARED_BYTES)
    arch = parser.parse_args().arch
    missed = set()
    for model, options in ENGINES:
        with engine(arch, model, compiles=False, **options) as (runner, launches):
            for wave in waves():
                serve(runner, wave)
        print(f"sm_{arch} {model} {options}: {len(launches.ahead)} ahead, {len(launches.run)} launched")
        missed |= launches.run - launches.ahead
    for name, key in sorted(missed):
        print(f"not ahead: {name} {key}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
