"""What the gateway knows of the model: its name, its length, its sampling defaults, its tokenizer and chat template.

Read once from a Hugging Face directory; never its weights. ``load_model`` is called by ``__main__`` and by tests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.chat_template import ChatTemplate
from gateway.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Where the client says nothing: the model's generation_config.json, else OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under the name that clients use."""

    name: str
    max_model_len: int
    vocab_size: int
    defaults: SamplingDefaults
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_model(directory: Path, name: str, max_model_len: int | None = None) -> ServedModel:
    """Raises ValueError, with the remedy, for a directory that cannot be served."""
    config = _read_json(directory / "config.json")
    if not config:
        raise ValueError(
            f"{directory} has no config.json, or an empty one: --model must be a Hugging Face model directory"
        )
    config |= config.get("text_config", {})
    tokenizer = Tokenizer.load(directory)
    return ServedModel(
        name=name,
        max_model_len=_max_model_len(config, max_model_len),
        vocab_size=config.get("vocab_size", tokenizer.vocab_size),
        defaults=_sampling_defaults(_read_json(directory / "generation_config.json")),
        tokenizer=tokenizer,
        chat_template=_chat_template(directory),
    )


def _max_model_len(config: dict[str, Any], wanted: int | None) -> int:
    limit = config.get("max_position_embeddings")
    if limit is None:
        if wanted is None:
            raise ValueError("config.json has no max_position_embeddings: give --max-model-len")
        return wanted
    if wanted is not None and wanted > limit:
        raise ValueError(f"--max-model-len {wanted} is beyond the model's {limit}: use at most {limit}")
    return wanted or int(limit)


def _sampling_defaults(generation_config: dict[str, Any]) -> SamplingDefaults:
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation_config[name] for name in names if generation_config.get(name) is not None}
    return SamplingDefaults(**given)


def _chat_template(directory: Path) -> ChatTemplate | None:
    """From chat_template.jinja, chat_template.json or tokenizer_config.json, in this order."""
    config = _read_json(directory / "tokenizer_config.json")
    source: Any = None
    if (path := directory / "chat_template.jinja").is_file():
        source = path.read_text(encoding="utf-8")
    source = source or _read_json(directory / "chat_template.json").get("chat_template")
    source = source or config.get("chat_template")
    if isinstance(source, list):  # several named ones
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return ChatTemplate(source, _special_tokens(directory, config)) if source else None


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as templates use them."""
    tokens: dict[str, str] = {}
    for source in (_read_json(directory / "special_tokens_map.json"), config):
        for name, value in source.items():
            content = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(content, str):
                tokens[name] = content
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    """Empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): fetch the model again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return content
