from __future__ import annotations

from itertools import product

import pytest

from engine.messages import SamplingParams
from engine.request import EDGES, Request, RequestStatus


def make_request(status: RequestStatus, **fields: object) -> Request:
    return Request("r", [1, 2], [3], SamplingParams(max_tokens=4), 0.0, 1.0, status=status, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("source", "target"), [*product(RequestStatus, RequestStatus)])
def test_transition_allows_the_edges_of_the_table_and_no_other(source: RequestStatus, target: RequestStatus) -> None:
    request = make_request(source)
    if target in EDGES[source]:
        request.transition(target)
        assert request.status is target
    else:
        with pytest.raises(ValueError, match=f"r: {source.name} -> {target.name}"):
            request.transition(target)
        assert request.status is source


def test_every_state_can_end_and_nothing_leaves_the_end() -> None:
    assert set(EDGES) == set(RequestStatus)
    assert all(RequestStatus.FINISHED in EDGES[status] for status in set(RequestStatus) - {RequestStatus.FINISHED})
    assert not EDGES[RequestStatus.FINISHED]


def test_tokens_given_at_the_start_count_as_output() -> None:
    request = make_request(RequestStatus.WAITING, priority=2, arrival_index=5)
    request.append_token(9)
    assert (request.output_token_ids, request.all_token_ids) == ([3, 9], [1, 2, 3, 9])
    assert (request.num_tokens, request.num_output_so_far, request.num_prefill_tokens) == (4, 1, 3)
    assert request.order == (2, 5)
