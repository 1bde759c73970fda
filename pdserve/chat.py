"""``pdserve chat``: a conversation in the terminal, streamed, with the figures of the last answer on request."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from pdserve.chat_client import ChatClient, ChatError
from pdserve.up.timing import RequestTimes, draw

HELP = "/stats  where the last answer's time went    /reset  forget the conversation    /quit  leave"


@dataclass
class Conversation:
    """What was said, and the id of the last request."""

    model: str
    max_tokens: int
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    last_request_id: str = ""

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was said, but not the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []


def chat(url: str, model: str | None, system: str | None, max_tokens: int) -> int:
    """Talk until /quit, end of input or Ctrl-C; the exit status."""
    console = Console(highlight=False)
    try:
        conversation = Conversation(model or asyncio.run(_model_of(url)), max_tokens, system)
    except ChatError as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1
    console.print(f"[bold]{escape(conversation.model)}[/] at {escape(url)}\n{HELP}\n")
    while True:
        try:
            line = console.input("[bold]you[/]    ").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line:
            # Ctrl-C while an answer comes ends the answer (the gateway aborts it everywhere), not the conversation.
            try:
                asyncio.run(_handle(line, url, conversation, console))
            except KeyboardInterrupt:
                console.print("\n")


async def _model_of(url: str) -> str:
    async with ChatClient(url) as client:
        return await client.model()


async def _handle(line: str, url: str, conversation: Conversation, console: Console) -> None:
    try:
        async with ChatClient(url) as client:
            if line == "/stats":
                await _show_stats(client, conversation, console)
            elif line == "/reset":
                conversation.reset()
            elif line.startswith("/"):
                console.print(HELP)
            else:
                await _say(line, client, conversation, console)
    except ChatError as error:
        console.print(f"\n[red]{escape(str(error))}[/]", soft_wrap=True)


async def _say(line: str, client: ChatClient, conversation: Conversation, console: Console) -> None:
    conversation.messages.append({"role": "user", "content": line})
    begin_s = time.monotonic()
    pieces: list[str] = []
    console.print("[bold]model[/]  ", end="")
    try:
        async for text in client.stream(conversation.model, conversation.messages, conversation.max_tokens):
            pieces.append(text)
            console.print(text, end="", markup=False)
    finally:
        conversation.last_request_id = client.request_id
        if pieces:
            conversation.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            conversation.messages.pop()
    console.print(f"\n[dim]{time.monotonic() - begin_s:.2f} s[/]\n")


async def _show_stats(client: ChatClient, conversation: Conversation, console: Console) -> None:
    if not conversation.last_request_id:
        console.print("Nothing was asked yet.\n")
        return
    console.print(draw(RequestTimes.from_json(await client.times(conversation.last_request_id))))
    console.print()
