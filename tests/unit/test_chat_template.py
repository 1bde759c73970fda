"""Our rendering of chat templates against transformers', which is the reference; templates of the common families."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest

from gateway.chat_template import ChatTemplate, TemplateRefusedError
from pdserve.model_store import prepare_default_model

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT_TURNS = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate user/assistant') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}
{{ ' ' + message['content'] + eos_token }}
{% endif %}
{% endfor %}"""
NAMESPACES = """{%- set ns = namespace(seen=0, names=[]) %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- set ns.seen = ns.seen + 1 %}
    {%- generation %}{{ message.role | upper }}: {{ message.content | trim }}{% endgeneration %}

{% endfor -%}
{%- if tools is not none %}TOOLS{% endif %}
{{- ns.seen }} {{ {'a': '<é>', 'b': [1, none]} | tojson }} {{ enable_thinking is defined and enable_thinking }}
{%- if strftime_now is defined %} {{ strftime_now('%Y') }}{% endif %}"""
TEMPLATES = {"chatml": CHATML, "strict_turns": STRICT_TURNS, "namespaces": NAMESPACES}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "user", "content": "a "}, {"role": "assistant", "content": " b"}, {"role": "user", "content": "你<&>"}],
    [{"role": "system", "content": "be kind"}, {"role": "user", "content": "x"}],
]


def reference(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    [text], _ = render_jinja_template([messages], chat_template=source, **TOKENS, **options)
    return str(text)


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "turns", "system"])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_same_as_transformers(name: str, add_generation_prompt: bool, messages: list[dict[str, Any]]) -> None:
    source = TEMPLATES[name]
    template = ChatTemplate(source, TOKENS)
    options = {"enable_thinking": True}
    if name == "strict_turns" and messages[0]["role"] == "system":
        with pytest.raises(jinja2.TemplateError, match="alternate"):
            reference(source, messages, add_generation_prompt=add_generation_prompt, **options)
        with pytest.raises(TemplateRefusedError, match="alternate"):
            template.render(messages, add_generation_prompt=add_generation_prompt, template_kwargs=options)
        return
    got = template.render(messages, add_generation_prompt=add_generation_prompt, template_kwargs=options)
    assert got == reference(source, messages, add_generation_prompt=add_generation_prompt, **options)


def test_continue_final_message() -> None:
    messages = [{"role": "user", "content": "count"}, {"role": "assistant", "content": "One, two,"}]
    template = ChatTemplate(CHATML, TOKENS)
    got = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert got == reference(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert got.endswith("One, two,")


def test_the_default_model() -> None:
    """The whole way from messages to token ids is AutoTokenizer's."""
    from transformers import AutoTokenizer

    from gateway.model import load_model

    directory = prepare_default_model()
    model = load_model(directory, "x")
    auto = AutoTokenizer.from_pretrained(directory)
    assert model.chat_template is not None
    for messages in CONVERSATIONS:
        text = model.chat_template.render(messages)
        assert text == auto.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        expected = auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert model.tokenizer.encode(text, add_special_tokens=False) == expected
    for text in ("a 123 b", "\t\t1", "naïve 你好 👩‍👧", "<|im_end|> x", "", "  spaces  "):
        token_ids = model.tokenizer.encode(text, add_special_tokens=True)
        assert token_ids == auto(text)["input_ids"]
        assert model.tokenizer.decode(token_ids, True) == auto.decode(token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].content.missing.deeper }}",
        "{{ 1 / 0 }}",
    ],
)
def test_hostile_or_broken_templates_are_refused(source: str) -> None:
    """Files from elsewhere: they neither reach into the process nor crash the request with a 500."""
    template = ChatTemplate(source, TOKENS)
    try:
        text = template.render([{"role": "user", "content": "x"}])
    except TemplateRefusedError:
        return
    assert "class" not in text


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate("{% for %}", TOKENS)
