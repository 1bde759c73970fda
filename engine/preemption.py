"""When a preempted request may come back, and what keeps it from losing its blocks again before it got on.

Pure; called by the scheduler. Why nothing locks up, in one law: while a preempted request waits for room nobody else is
admitted and nothing is reserved, and once it came back it keeps its blocks until it has drawn a token. So there are
never more preemptions than tokens. A reservation has all its blocks from the start, cannot lose them, and takes what is
left; while others catch up, it leaves the headroom that it would need to come back itself.

- The victim is the youngest of those that run and have got on: the oldest go on, end, and leave their blocks.
- ``headroom`` makes it rare that somebody has to go then: it comes back only with room for it *and* for what the others
  will grow by until it has caught up; alone, it needs no more than its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.request import Request


def headroom(request: Request, running: Iterable[Request], config: EngineConfig, step_tokens: int) -> int:
    """Blocks that must stay available when ``request`` comes back, for itself and ``running`` to grow into.

    ``step_tokens``: of those that are behind, in a step."""
    growing = [other for other in running if not other.sends_kv]
    if not growing:
        return 0
    behind = [max(0, other.num_tokens - other.num_computed_tokens - 1) for other in growing]
    to_compute = sum(behind) + request.num_tokens - request.num_host_tokens
    # A block's worth of tokens at least, else it would come and go with each token.
    steps = max(config.block_size, -(-to_compute // max(1, step_tokens)) + 1)
    own = _blocks(request, steps, config) - -(-request.num_tokens // config.block_size)
    return own + sum(max(0, _blocks(other, steps, config) - len(other.block_table)) for other in growing)


def _blocks(request: Request, steps: int, config: EngineConfig) -> int:
    """That it holds after so many steps."""
    longest = len(request.prompt_token_ids) + request.sampling.max_tokens
    num_tokens = min(request.num_tokens + request.num_pending_tokens + steps, longest)
    return -(-num_tokens // config.block_size)


def is_catching_up(request: Request) -> bool:
    """It was preempted, came back, and its next token is not drawn yet."""
    return request.was_preempted and request.num_computed_tokens < request.num_prefill_tokens
