"""A gateway with small limits in front of a fake router, as fixtures, and what an error must look like."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from gateway.model import ServedModel
from pdserve.model_store import prepare_default_model
from tests.services.gateway_harness import (
    MODEL_NAME,
    FakeRouter,
    load_test_model,
    running_gateway,
    running_router,
    text_script,
)
from tests.services.openai_schema import assert_valid

HI = [{"role": "user", "content": "hi"}]


CHAT = "/v1/chat/completions"


COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return load_test_model(prepare_default_model(), max_model_len=256)


@pytest_asyncio.fixture
async def router(model: ServedModel) -> AsyncIterator[FakeRouter]:
    async with running_router(FakeRouter(text_script(model, "fine."))) as router:
        yield router


@pytest_asyncio.fixture
async def http(model: ServedModel, router: FakeRouter) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        running_gateway(model, [router.address], max_choices=8, max_body_bytes=50_000) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as http,
    ):
        yield http


def assert_error(
    response: httpx.Response, status: int, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert_valid("ErrorResponse", body)
    error: dict[str, Any] = body["error"]
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert "x-request-id" in response.headers
    return error


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": HI} if path == CHAT else {"prompt": "x"}
    return {"model": MODEL_NAME, **prompt, **fields}
