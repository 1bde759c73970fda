"""transformers as the independent oracle of greedy output, in fp32, on the CPU unless a test moves it."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TIE_MARGIN = 1e-4
"""A first divergence is a tie only where the oracle's two best logits are closer than this."""


class Oracle:
    """Greedy generation and the judgement of a first divergence."""

    def __init__(self, model_dir: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        self.eos = self.model.generation_config.eos_token_id
        self.ties: list[str] = []

    def chat_ids(self, text: str) -> list[int]:
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        return [int(token) for token in ids]

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_tokens: int, batch: int = 16) -> list[list[int]]:
        """Greedy continuations, each ending with EOS or after ``max_tokens``; left-padded, attention mask passed."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        outputs: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            width = max(len(prompts[i]) for i in rows)
            ids = self._tensor([[self.eos] * (width - len(prompts[i])) + prompts[i] for i in rows])
            mask = self._tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows])
            result = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=self.eos
            )
            for row, i in enumerate(rows):
                tokens = result[row, width:].tolist()
                outputs[i] = tokens[: tokens.index(self.eos) + 1] if self.eos in tokens else tokens
        return outputs

    @torch.inference_mode()
    def margin(self, context: list[int], first: int, second: int) -> float:
        """|logit(first) - logit(second)| after ``context``."""
        logits = self.model(self._tensor([context]), logits_to_keep=1).logits[0, -1]
        top = logits.topk(2).indices.tolist()
        if {first, second} != set(top):
            return float("inf")
        return float((logits[first] - logits[second]).abs())

    def _tensor(self, rows: list[list[int]]) -> torch.Tensor:
        """Where the model is: on the CPU, unless a test moved it."""
        return torch.tensor(rows, device=self.model.device)

    def assert_same(self, prompt: list[int], got: list[int], want: list[int], name: str) -> None:
        """Token for token, up to a first divergence that is a tie (which is noted in ``ties``)."""
        for position, (mine, theirs) in enumerate(zip(got, want, strict=False)):
            if mine != theirs:
                margin = self.margin(prompt + want[:position], mine, theirs)
                assert margin < TIE_MARGIN, f"{name}: token {position} is {mine}, oracle {theirs}, margin {margin:.2e}"
                self.ties.append(f"{name}: token {position}, margin {margin:.2e}")
                return
        assert len(got) == len(want), f"{name}: {len(got)} tokens, oracle {len(want)}"
