"""A prefill and a decode core with the link between them, stepped by hand, and what came out of each."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core import EngineCore
from engine.messages import AddRequest, ErrorCode, FinishReason, RequestOutput
from tests.unit.fake_runner import make_core, make_message
from tests.unit.handoff_link import Clock, Link, receive_kv, send_kv
from tests.unit.leaks import assert_no_leak, check_books


class Cluster:
    """P, D, the link between them, and what came out."""

    def __init__(self, p: dict[str, int] | None = None, d: dict[str, int] | None = None) -> None:
        self.clock = Clock()
        self.p = make_core(clock=self.clock, **(p or {}))  # type: ignore[arg-type]
        self.d = make_core(clock=self.clock, **(d or {}))  # type: ignore[arg-type]
        self.link = Link(self.p, self.d)
        self.outputs: dict[str, dict[str, list[RequestOutput]]] = {"p": {}, "d": {}}

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int = 8, **fields: object) -> AddRequest:
        """To D and to P; the message returned is the plain one, for the oracle."""
        self.d.add(make_message(request_id, prompt, max_tokens, handoff=receive_kv(), **fields))  # type: ignore[arg-type]
        self.p.add(make_message(request_id, prompt, max_tokens, handoff=send_kv(), **fields))  # type: ignore[arg-type]
        return make_message(request_id, prompt, max_tokens, **fields)  # type: ignore[arg-type]

    def step(self, name: str) -> None:
        core: EngineCore = getattr(self, name)
        self.clock.now_s += 0.004
        for output in core.step().outputs:
            outputs = self.outputs[name].setdefault(output.request_id, [])
            assert not outputs or outputs[-1].finish_reason is None, "an output after the last one"
            outputs.append(output)
            if name == "p" and output.finish_reason is FinishReason.ERROR:
                # The router would try again elsewhere, and in the end tell D.
                self.d.fail_request(output.request_id, ErrorCode.HANDOFF_FAILED, "P failed", True)
                self.link.close(output.request_id)
        check_books(core)

    def run(self, max_turns: int = 3000) -> None:
        for _ in range(max_turns):
            if not (self.p.scheduler.requests or self.d.scheduler.requests or self.link.wire):
                break
            self.step("p")
            self.link.deliver()
            self.step("d")
        self.step("p")
        self.step("d")
        assert_no_leak(self.p)
        assert_no_leak(self.d)
        assert not self.link.wanted
        assert not self.link.received

    def tokens(self, request_id: str) -> list[int]:
        assert not any(output.token_ids for output in self.outputs["p"].get(request_id, []))
        return [token for output in self.outputs["d"][request_id] for token in output.token_ids]

    def end(self, name: str, request_id: str) -> RequestOutput:
        return self.outputs[name][request_id][-1]
