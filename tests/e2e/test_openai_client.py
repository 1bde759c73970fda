"""The official ``openai`` client against a real cluster with prefill and decode apart."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.cluster import Cluster, running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, model_dir) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("openai"), str(model_dir), worker_flags=("--dtype", "float32")) as cluster:
        yield cluster
        cluster.assert_no_leak()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat_answers_and_stops_by_itself(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="test-model", messages=FRANCE, temperature=0)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 40
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_is_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="test-model", messages=FRANCE, temperature=0)
    text, finish, usage = "", None, None
    stream = client.chat.completions.create(
        model="test-model", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert text == whole.choices[0].message.content
    assert finish == "stop"
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_choices_of_one_prompt(client: openai.OpenAI, cluster: Cluster) -> None:
    prompt = [{"role": "user", "content": "Write one sentence about the sea. " * 8}]

    def ask() -> list[str | None]:
        answer = client.chat.completions.create(
            model="test-model", messages=prompt, n=4, seed=3, temperature=1.0, max_tokens=24
        )
        return [choice.message.content for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1, "four draws, four streams of noise"
    assert ask() == first, "the seed pins all of them"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="test-model", messages=FRANCE, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)
        assert entry.logprob <= 0


def test_stop_string(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="test-model", messages=FRANCE, temperature=0, stop=["Par"])
    assert answer.choices[0].finish_reason == "stop"
    assert "Par" not in (answer.choices[0].message.content or "")
    assert (answer.choices[0].message.content or "").startswith("The capital")


def test_errors_are_typed(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=FRANCE)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="test-model", prompt="x " * 20_000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="test-model", messages=FRANCE, temperature=9)
