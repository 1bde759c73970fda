"""Text work off the event loop: what is short is done at once, what is long goes to a few threads.

Called by the endpoints. Owns the threads; ``tokenizers`` releases the interpreter lock while it works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from gateway.chat_template import TemplateRefusedError
from gateway.errors import invalid, prompt_too_long
from gateway.model import ServedModel

T = TypeVar("T")
INLINE_CHARS = 4096
"""About a millisecond of tokenizing."""
INLINE_TOKENS = 4096
INLINE_BYTES = 64 << 10
"""About a millisecond of reading JSON."""


class TextWorker:
    """Templates, tokenizes and decodes for one model."""

    def __init__(self, model: ServedModel, num_threads: int) -> None:
        self._model = model
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="text")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, is_short: bool, work: Callable[[], T]) -> T:
        """``work()``, here or in a thread."""
        if is_short:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        add_special_tokens: bool = False,
        max_tokens: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Messages to a prompt's token ids; ``options`` as for ChatTemplate.render. What cannot be ``max_tokens`` or
        less is refused without tokenizing it, which would take seconds. Raises GatewayError."""
        template = self._model.chat_template
        if template is None:
            raise invalid("this model has no chat template: use /v1/completions", "messages")

        def work() -> list[int]:
            return self._encode(template.render(messages, **options), add_special_tokens, max_tokens, "messages")

        num_chars = sum(len(message.get("content") or "") for message in messages)
        try:
            return await self.run(num_chars <= INLINE_CHARS, work)
        except TemplateRefusedError as error:
            raise invalid(str(error), "messages") from error

    async def encode(self, text: str, add_special_tokens: bool, max_tokens: int | None = None) -> list[int]:
        """A text's token ids; ``max_tokens`` as of ``encode_chat``. Raises GatewayError."""
        return await self.run(
            len(text) <= INLINE_CHARS, lambda: self._encode(text, add_special_tokens, max_tokens, "prompt")
        )

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return await self.run(
            len(token_ids) <= INLINE_TOKENS, lambda: self._model.tokenizer.decode(token_ids, skip_special_tokens)
        )

    def _encode(self, text: str, add_special_tokens: bool, max_tokens: int | None, param: str) -> list[int]:
        tokenizer = self._model.tokenizer
        if max_tokens is not None and len(text) > max_tokens:
            least = tokenizer.least_tokens(text)
            if least > max_tokens:
                raise prompt_too_long(max_tokens, least, param)
        return tokenizer.encode(text, add_special_tokens)
