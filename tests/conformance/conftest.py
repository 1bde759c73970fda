"""Every backend passes the same suite. One pair of processes serves all tests; each test configures it anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kv_transfer.backends import BACKENDS
from tests.conformance.pair import Pair
from tests.conformance.peers import Config

MakePair = Callable[..., Pair]


@pytest.fixture(scope="session")
def processes() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.fixture(params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make_pair(processes: Pair, backend: str) -> MakePair:
    """``make_pair(sender={...}, receiver={...})``: fields of Config that are not the default."""

    def make(sender: dict[str, object] | None = None, receiver: dict[str, object] | None = None) -> Pair:
        processes.configure(
            Config(backend, "p", **(sender or {})),  # type: ignore[arg-type]
            Config(backend, "d", **(receiver or {})),  # type: ignore[arg-type]
        )
        return processes

    return make


@pytest.fixture
def pair(make_pair: MakePair) -> Pair:
    return make_pair()
