"""Whether a JSON object is what the OpenAI API documents: against its own OpenAPI file where the data folder is given
(``PDSERVE_DATA``), else against the required fields written down here."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

_OBJECT = {"type": "object"}
_USAGE = {"type": "object", "required": ["prompt_tokens", "completion_tokens", "total_tokens"]}


def _answer(kind: str, choice_fields: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["id", "object", "created", "model", "choices"],
        "properties": {
            "id": {"type": "string"},
            "object": {"const": kind},
            "created": {"type": "integer"},
            "model": {"type": "string"},
            "choices": {"type": "array", "items": {"type": "object", "required": choice_fields}},
            "usage": {"anyOf": [_USAGE, {"type": "null"}]},
        },
    }


OWN_SCHEMAS: dict[str, dict[str, Any]] = {
    "CreateChatCompletionResponse": _answer("chat.completion", ["index", "message", "logprobs", "finish_reason"]),
    "CreateChatCompletionStreamResponse": _answer("chat.completion.chunk", ["index", "delta", "finish_reason"]),
    "CreateCompletionResponse": _answer("text_completion", ["index", "text", "logprobs", "finish_reason"]),
    "Model": {"type": "object", "required": ["id", "object", "created", "owned_by"]},
    "ListModelsResponse": {"type": "object", "required": ["object", "data"]},
    "ErrorResponse": {
        "type": "object",
        "required": ["error"],
        "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
    },
}


def openapi_path() -> Path | None:
    folder = os.environ.get("PDSERVE_DATA")
    path = Path(folder) / "openai_openapi_inference_subset.json" if folder else None
    return path if path is not None and path.exists() else None


@cache
def openapi_schemas() -> dict[str, Any] | None:
    path = openapi_path()
    return None if path is None else json.loads(path.read_text())["components"]["schemas"]


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    schemas = openapi_schemas()
    if schemas is None:
        return jsonschema.Draft202012Validator(OWN_SCHEMAS[name])
    document = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": _as_json_schema(schemas)}}
    return jsonschema.Draft202012Validator(document)


def _as_json_schema(node: Any) -> Any:
    """OpenAPI 3.0's ``nullable`` in terms of JSON Schema."""
    if isinstance(node, list):
        return [_as_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    converted = {key: _as_json_schema(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [converted, {"type": "null"}]} if node.get("nullable") is True else converted


def assert_valid(name: str, instance: Any) -> None:
    """Raises jsonschema.ValidationError with the offending path."""
    _validator(name).validate(instance)
