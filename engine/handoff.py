"""What the engine core asks of the two ends of a hand-off. Implemented outside the engine, which knows no transfer.

All calls come from the engine's own thread, inside ``EngineCore.step()`` or one of the core's methods; none may block.
The answers come back as calls on the core, now or later:

    P: want_ticket(request) ----> core.grant_ticket | core.defer_ticket | core.fail_request
       kv_computed(...)           (pack and send)
       prefill_ended(...) ------> core.release_kv
    D: want_kv(request) --------> core.reserve_kv, core.write_kv ..., core.kv_ready
                                  (core.release_reservation: back to waiting)
       attempt_ends(request) ---> core.keep_reservation ... core.take_over_reservation | core.drop_reservation
    both: request_ended(request)  the request is gone (abort, deadline), its blocks too: close the hand-off
"""

from __future__ import annotations

from typing import Protocol

from engine.messages import RequestOutput
from engine.request import Request


class HandoffSender(Protocol):
    """P's end, for requests whose ``handoff`` is a ``SendKV``."""

    def want_ticket(self, request: Request) -> None:
        """The request is next in line and its prompt would fit: ask the receiver. It holds nothing until granted."""

    def kv_computed(self, request: Request, token_start: int, token_end: int, layer_start: int, layer_end: int) -> None:
        """KV of these tokens in these layers is in ``request.block_table`` and the receiver lacks it.

        Ranges of one request cover every token from ``num_remote_cached_tokens`` to the end of the prompt in every
        layer exactly once. The blocks may be freed at any time after this returns: copy what is to be sent.
        """

    def prefill_ended(self, request: Request, output: RequestOutput) -> None:
        """Token 0 was drawn; ``output`` carries it, with a ``finish_reason`` if it was the last. P holds the blocks."""

    def request_ended(self, request: Request) -> None:
        """The request ended while its hand-off was open, and not by a call of this sender."""


class HandoffReceiver(Protocol):
    """D's end, for requests whose ``handoff`` is a ``ReceiveKV``."""

    def want_kv(self, request: Request) -> None:
        """The request was added and waits for its KV; it holds nothing until ``reserve_kv``."""

    def attempt_ends(self, request: Request) -> None:
        """``request_ended`` comes next, and then, maybe, the next attempt of its transfer."""

    def request_ended(self, request: Request) -> None:
        """The request ended while it waited for its KV, and not by a call of this receiver. Refuse what still comes."""
