"""What the end-to-end tests share: the real small model, prompts, and transformers as the oracle."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pdserve.model_store import prepare_default_model
from tests.e2e.oracle import Oracle

OWN_PROMPTS = [
    "Write a short story about a lighthouse keeper who collects bottles.",
    "Explain why the sky is blue to a child of six.",
    "List five uses for an empty jam jar.",
    "What is the difference between a frog and a toad?",
    "Draft an email that declines a meeting politely.",
    "How do I boil an egg so that the yolk stays soft?",
    "Summarise the plot of Hamlet in three sentences.",
    "Give me a Python function that reverses a list.",
]


def mt_bench_first_turns() -> list[str] | None:
    """The 80 first turns of MT-bench, when the data folder is given."""
    folder = os.environ.get("PDSERVE_DATA")
    path = Path(folder) / "mt_bench_question.jsonl" if folder else None
    if path is None or not path.exists():
        return None
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return prepare_default_model()


TIES = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def oracle(model_dir: Path, request: pytest.FixtureRequest) -> Oracle:
    oracle = Oracle(model_dir)
    request.config.stash[TIES] = oracle.ties
    return oracle


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """A tie is allowed, but never silently."""
    if TIES in config.stash:
        ties = config.stash[TIES]
        terminalreporter.write_line(f"first divergences from transformers counted as ties: {len(ties)}")
        for tie in ties:
            terminalreporter.write_line(f"  {tie}")


@pytest.fixture(scope="session")
def prompts(oracle: Oracle) -> list[list[int]]:
    """Token ids of chat prompts: MT-bench's first turns, or our own where that data is not at hand."""
    return [oracle.chat_ids(text) for text in mt_bench_first_turns() or OWN_PROMPTS]


@pytest.fixture(scope="session")
def expected(oracle: Oracle, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates greedily, 128 tokens at most."""
    return oracle.generate(prompts, max_tokens=128)
