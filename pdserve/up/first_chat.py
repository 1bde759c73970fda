"""The first chat of a new cluster: through the OpenAI API, streamed to the terminal, with the drawing of its time."""

from __future__ import annotations

import asyncio
import time

from rich.console import Console

from pdserve.chat_client import ChatClient, ChatError
from pdserve.up.errors import UpError
from pdserve.up.timing import RequestTimes, draw

_MAX_TOKENS = 128
_RETRY_FOR_S = 20.0


async def first_chat(url: str, model: str, prompt: str, console: Console) -> None:
    """Ask, print the answer as it comes, then the drawing.

    For a moment the router may not have met the workers yet: until the first token, an answer "try again" is obeyed.
    Raises: UpError.
    """
    messages = [{"role": "user", "content": prompt}]
    deadline_s = time.monotonic() + _RETRY_FOR_S
    console.print(f"\n[bold]you[/]    {prompt}")
    console.print("[bold]model[/]  ", end="")
    async with ChatClient(url) as client:
        while True:
            try:
                async for text in client.stream(model, messages, _MAX_TOKENS, temperature=0):
                    console.print(text, end="", markup=False, highlight=False)
                break
            except ChatError as error:
                if not error.retryable or time.monotonic() > deadline_s:
                    console.print()
                    raise UpError(f"the first chat failed: {error}") from error
                await asyncio.sleep(0.05)
        console.print("\n")
        try:
            times = RequestTimes.from_json(await client.times(client.request_id))
        except (ChatError, KeyError, ValueError) as error:
            raise UpError(f"the gateway does not say where the first chat's time went: {error}") from error
    console.print(draw(times))
