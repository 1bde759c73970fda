"""The model's chat template: messages to the text of a prompt.

Chat templates are Jinja programs that come with model files, so they run in Jinja's immutable sandbox, with the names
that Hugging Face templates expect: raise_exception, strftime_now, tojson (plain JSON), loop controls, and the special
tokens. Checked against transformers in the tests; transformers itself is not imported (it loads torch).
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_CONTINUE_MARK = "<PDSERVE CONTINUES HERE>"


class TemplateRefusedError(Exception):
    """The template does not accept these messages; the message is for the client."""


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = special_tokens

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises TemplateRefusedError."""
        if continue_final_message:
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + _CONTINUE_MARK}]
        variables: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **(template_kwargs or {}),
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(**variables)
        except Exception as error:  # a template is a program: it may fail in any way
            raise TemplateRefusedError(f"the model's chat template refuses these messages: {error}") from error
        if continue_final_message:
            text, found, _ = text.rpartition(_CONTINUE_MARK)
            if not found:
                raise TemplateRefusedError("the model's chat template drops the end of the final message")
        return text


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model has seen."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
