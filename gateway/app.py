"""The HTTP surface: routes, and what each of them calls.

POST /v1/chat/completions  chat.py          GET /health   503 while no request could be served
POST /v1/completions       completions.py   GET /live     the event loop turns
GET  /v1/models[/{id}]     here             GET /metrics  Prometheus
POST /tokenize /detokenize tokenize.py      GET /debug/requests[/{id}]  records.py
                                            GET /version  of pdserve
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.admission import Admission
from gateway.chat import chat_completions
from gateway.completions import completions
from gateway.config import GatewayConfig
from gateway.errors import GatewayError
from gateway.http import JsonResponse, RequestGuard, error_response
from gateway.model import ServedModel
from gateway.records import RecentRequests
from gateway.routers import RouterPool
from gateway.serving import Gateway
from gateway.text import TextWorker
from gateway.tokenize import detokenize, tokenize
from pdserve import __version__, tls
from pdserve.address import join_address
from telemetry.metrics import GatewayMetrics
from telemetry.tracing import start_tracer

SERVED = "/v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /live, /metrics, /version"
WORKING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"})


def create_app(config: GatewayConfig, model: ServedModel) -> FastAPI:
    """The application; it opens its router sessions when it starts and closes them when it ends."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    gateway = Gateway(
        config=config,
        model=model,
        text=TextWorker(model, config.tokenizer_threads),
        routers=RouterPool(config.routers, config.router_wait_s, tls.from_option(config.tls_dir)),
        metrics=metrics,
        recent=RecentRequests(config.recent_requests),
        admission=Admission(config.max_requests, metrics.open_requests.set),
        tracer=start_tracer(
            "gateway", join_address(config.host, config.port), config.otlp_endpoint, config.trace_sample_ratio
        ),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.routers.start()
        try:
            yield
        finally:
            await gateway.routers.close()
            gateway.text.close()
            await asyncio.to_thread(gateway.tracer.close)

    app = FastAPI(title="pdserve", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.gateway = gateway  # for the gRPC front, which serves the same
    app.add_middleware(
        RequestGuard,
        limited_paths=WORKING_PATHS,
        admission=gateway.admission,
        on_answer=lambda path, status: metrics.http_requests.labels(path, str(status)).inc(),
    )
    app.add_exception_handler(GatewayError, _on_gateway_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    _add_openai_routes(app, gateway)
    _add_operator_routes(app, gateway, registry)
    return app


def _add_openai_routes(app: FastAPI, gateway: Gateway) -> None:
    created = int(time.time())

    def model_object() -> dict[str, object]:
        model = gateway.model
        return {
            "id": model.name,
            "object": "model",
            "created": created,
            "owned_by": "pdserve",
            "max_model_len": model.max_model_len,
        }

    @app.post("/v1/chat/completions")
    async def post_chat_completions(request: Request) -> Response:
        return await chat_completions(gateway, request)

    @app.post("/v1/completions")
    async def post_completions(request: Request) -> Response:
        return await completions(gateway, request)

    @app.get("/v1/models")
    async def get_models() -> Response:
        return JsonResponse({"object": "list", "data": [model_object()]})

    @app.get("/v1/models/{model_id:path}")
    async def get_model(model_id: str) -> Response:
        gateway.check_model(model_id)
        return JsonResponse(model_object())

    @app.post("/tokenize")
    async def post_tokenize(request: Request) -> Response:
        return await tokenize(gateway, request)

    @app.post("/detokenize")
    async def post_detokenize(request: Request) -> Response:
        return await detokenize(gateway, request)


def _add_operator_routes(app: FastAPI, gateway: Gateway, registry: CollectorRegistry) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def get_health() -> Response:
        reason = gateway.not_ready_reason
        if reason is None:
            return JsonResponse({"status": "ready"})
        return JsonResponse({"status": "not_ready", "reason": reason}, status_code=503)

    @app.api_route("/live", methods=["GET", "HEAD"])
    async def get_live() -> Response:
        return JsonResponse({"status": "live"})

    @app.get("/version")
    async def get_version() -> Response:
        return JsonResponse({"version": __version__})

    @app.get("/metrics")
    async def get_metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/debug/requests")
    async def get_request_records() -> Response:
        return JsonResponse({"requests": [record.summary() for record in gateway.recent.newest_first()]})

    @app.get("/debug/requests/{request_id:path}")
    async def get_request_record(request_id: str) -> Response:
        record = gateway.recent.get(request_id)
        if record is None:
            raise GatewayError(
                404,
                f"no recent request has the x-request-id or answer id {request_id!r}: /debug/requests lists the last "
                f"{gateway.config.recent_requests}, which are kept",
                code="not_found",
            )
        return JsonResponse(record.view())


async def _on_gateway_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown paths and methods, as OpenAI error objects."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        message += f". There are {SERVED}"
    return error_response(GatewayError(error.status_code, message, code=code))
