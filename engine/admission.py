"""Which requests the engine refuses at once, and what it says to them.

Refused is what could never run here, so that it never waits in vain. Pure: called by ``EngineCore.add`` with the
message and the engine's limits. Load (a full queue, a drain) is the core's business.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.messages import AddRequest, ErrorCode, SendKV


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Measured or read at start."""

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int

    @property
    def pool_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class Refusal:
    code: ErrorCode
    message: str
    retryable: bool = False


def find_refusal(message: AddRequest, limits: EngineLimits) -> Refusal | None:
    """The reason why this request can never run on an engine with these limits, or None."""
    prompt_token_ids, max_tokens = message.prompt_token_ids, message.sampling.max_tokens
    if not prompt_token_ids:
        return Refusal(ErrorCode.INVALID_REQUEST, "the prompt is empty: send at least one token")
    if max_tokens < 1:
        return Refusal(ErrorCode.INVALID_REQUEST, f"max_tokens={max_tokens}: ask for at least one token")
    for token_ids in (prompt_token_ids, message.output_token_ids):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < limits.vocab_size):
            return Refusal(
                ErrorCode.INVALID_REQUEST,
                f"a token id is outside of the model's vocabulary (0 to {limits.vocab_size - 1}): "
                "tokenize with this model's tokenizer",
            )
    num_prompt = len(prompt_token_ids)
    if num_prompt + max_tokens > limits.max_model_len:
        return Refusal(
            ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} exceed the model's length of "
            f"{limits.max_model_len} tokens: shorten the prompt or lower max_tokens",
        )
    if isinstance(message.handoff, SendKV):
        needed = num_prompt + len(message.output_token_ids)
    else:
        # One decoded token at least; the last token's KV is never needed.
        needed = max(num_prompt + 1, num_prompt + max_tokens - 1)
    if needed > limits.pool_tokens:
        return Refusal(
            ErrorCode.PROMPT_TOO_LARGE,
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} need KV for {needed} tokens, the worker's pool "
            f"holds {limits.pool_tokens}: lower max_tokens, or give the worker a larger --kv-cache-bytes",
        )
    return None
