"""How our Triton kernels are launched; and how those of a start are compiled at once, before the first is launched.

A kernel is compiled when it is first launched with arguments of a new kind, on the thread that launches it, one after
the other: most of a start with an empty cache. Inside ``compile_ahead`` a launch runs nothing. It only lets Triton see
its arguments, and threads compile what these need: Triton lets go of the interpreter in all passes but the first, which
takes a tenth of the time.

    with compile_ahead():   launch(a) launch(b) launch(a) launch(c)        -> a, b, c compile side by side
    afterwards:             launch(a) ...                                  -> finds it

What is missed here, or fails, or is given up, is compiled at its first launch, as ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import structlog
import triton

MAX_THREADS = 8
"""More gain little: the longest kernel takes a tenth of what all take. Eight take 0.1 GB more than one."""
PATIENCE_S = 120.0
"""Far more than all take one after the other."""

log = structlog.get_logger()
_only_compile = False


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """``kernel[grid](*args, **options)``, on the current stream, as fast."""
    kernel.run(*args, grid=grid, warmup=_only_compile, **options)


@contextmanager
def compile_ahead(num_threads: int | None = None, patience_s: float = PATIENCE_S) -> Iterator[None]:
    """See above; ends when all is compiled. For one thread, which launches nothing else meanwhile.

    ``num_threads`` None: as many as cores that this process may use, at most ``MAX_THREADS``.
    """
    global _only_compile
    threads = _Threads(num_threads or min(MAX_THREADS, len(os.sched_getaffinity(0))))
    try:
        # Triton forgets what fails, and says nothing of it: that is done below.
        with triton.AsyncCompileMode(threads, ignore_errors=True):
            _only_compile = True
            try:
                yield
            finally:
                _only_compile = False
                threads.settle_all(patience_s)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    errors = [error for outcome in threads.outcomes if (error := outcome.exception()) is not None]
    if errors:
        log.warning("kernels_not_compiled_ahead", count=len(errors), first=repr(errors[0])[:500])


class _Threads(ThreadPoolExecutor):
    """Its outcomes can be given up: Triton waits for them without end."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads, "compile")
        self.outcomes: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        outcome: Future[Any] = Future()
        self.outcomes.append(outcome)

        def run() -> None:
            try:
                compiled = fn(*args, **kwargs)
            except Exception as error:
                _settle(outcome, error)
            else:
                _settle(outcome, None, compiled)

        super().submit(run)
        return outcome

    def settle_all(self, patience_s: float) -> None:
        """What is not done in that time has failed."""
        for late in wait(self.outcomes, patience_s).not_done:
            _settle(late, TimeoutError(f"not compiled after {patience_s:.0f} s"))


def _settle(outcome: Future[Any], error: Exception | None, compiled: Any = None) -> None:
    try:
        if error is None:
            outcome.set_result(compiled)
        else:
            outcome.set_exception(error)
    except InvalidStateError:
        return  # the other side was first: given up, or done just then
