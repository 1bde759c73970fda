"""What transformers answers to the prompts of the matrix; computed once per run."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.oracle import Oracle
from tests.faults.cells import Reference

PROMPT = "The ship left the harbour at dawn and nobody waved. " * 48 + "Tell the story of this ship in many words."
SHORT_PROMPT = "What is the difference between a frog and a toad?"
MAX_TOKENS = 110
"""Long enough to be met while it runs, and for two requests to outgrow the pool."""


def reference(model_dir: Path) -> Reference:
    oracle = Oracle(model_dir)
    prompt, short_prompt = oracle.chat_ids(PROMPT), oracle.chat_ids(SHORT_PROMPT)
    (answer,) = oracle.generate([prompt], MAX_TOKENS)
    (short_answer,) = oracle.generate([short_prompt], 6)
    return Reference(prompt, answer, short_prompt, short_answer)
