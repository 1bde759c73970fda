"""One choice's tokens to shown text, logprobs and finish reason."""

from __future__ import annotations

import pytest

from gateway.choice import ChoiceDecoder, Delta
from pdserve.v1 import inference_pb2 as pb
from tests.unit.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
STOP, LENGTH = pb.FINISH_REASON_STOP, pb.FINISH_REASON_LENGTH


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def output(token_ids: list[int], finish: pb.Finish | None = None, with_logprobs: bool = True) -> pb.Output:
    logprobs = [pb.TokenLogprobs(logprob=-token_id) for token_id in token_ids] if with_logprobs else []
    made = pb.Output(token_ids=token_ids, logprobs=logprobs)
    if finish is not None:
        made.finish.CopyFrom(finish)
    return made


def push_each(decoder: ChoiceDecoder, token_ids: list[int], finish: pb.Finish) -> list[Delta]:
    deltas = []
    for i, token_id in enumerate(token_ids):
        deltas.append(decoder.push(output([token_id], finish if i == len(token_ids) - 1 else None)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def logprob_ids(deltas: list[Delta]) -> list[int]:
    return [token.token_id for delta in deltas for token in delta.logprobs]


def test_stop_token_is_not_shown_but_counted() -> None:
    token_ids = encode("hello world<|end|>")
    decoder = ChoiceDecoder(TOKENIZER, [], skip_special_tokens=False)
    deltas = push_each(decoder, token_ids, pb.Finish(reason=STOP, stop_token_id=token_ids[-1]))
    assert text(deltas) == "hello world"
    assert logprob_ids(deltas) == token_ids[:-1]
    assert [i for delta in deltas for i in delta.token_ids] == token_ids
    assert decoder.num_tokens == len(token_ids)
    assert decoder.finish_reason == "stop"


def test_last_token_by_length_is_shown() -> None:
    decoder = ChoiceDecoder(TOKENIZER, [])
    deltas = push_each(decoder, encode("the ship"), pb.Finish(reason=LENGTH))
    assert text(deltas) == "the ship"
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("tokens_per_output", [1, 3, 100])
def test_stop_string_cuts_text_logprobs_and_tokens(tokens_per_output: int) -> None:
    token_ids = encode("hello world stop the ship")
    decoder = ChoiceDecoder(TOKENIZER, [], stop=[" st"])
    deltas: list[Delta] = []
    for at in range(0, len(token_ids), tokens_per_output):
        deltas.append(decoder.push(output(token_ids[at : at + tokens_per_output])))
        if decoder.finish_reason is not None:
            break
    assert text(deltas) == "hello world"
    assert decoder.finish_reason == "stop"
    assert decoder.stopped_by_string
    assert TOKENIZER.decode(logprob_ids(deltas), True) == "hello world"
    up_to_match = next(n for n in range(len(token_ids)) if " st" in TOKENIZER.decode(token_ids[:n], True))
    assert decoder.num_tokens == up_to_match


def test_held_text_comes_out_at_the_end() -> None:
    decoder = ChoiceDecoder(TOKENIZER, [], stop=["the ships"])
    deltas = push_each(decoder, encode("hello the ship"), pb.Finish(reason=LENGTH))
    assert text(deltas) == "hello the ship"
    assert deltas[-1].finish_reason == "length"


def test_logprobs_wait_for_their_text() -> None:
    """A character over several tokens: their logprobs come with the character, all at its place."""
    token_ids = encode("é👩 你")
    decoder = ChoiceDecoder(TOKENIZER, [])
    deltas = push_each(decoder, token_ids, pb.Finish(reason=LENGTH))
    assert logprob_ids(deltas) == token_ids
    for delta in deltas:
        assert bool(delta.text) == bool(delta.logprobs)
    placed = [token for delta in deltas for token in delta.logprobs]
    whole = text(deltas)
    for token in placed:
        shown = whole[token.start : token.end].encode()
        assert TOKENIZER.token_bytes(token.token_id) in shown


def test_unfinished_character_is_shown_at_the_end() -> None:
    token_ids = encode("a👩")[:2]
    decoder = ChoiceDecoder(TOKENIZER, [])
    deltas = push_each(decoder, token_ids, pb.Finish(reason=LENGTH))
    assert text(deltas) == TOKENIZER.decode(token_ids, True) == "a�"
    assert logprob_ids(deltas) == token_ids


def test_min_tokens_come_before_stop_strings() -> None:
    token_ids = encode("stop stop stop")
    decoder = ChoiceDecoder(TOKENIZER, [], stop=["stop"], min_tokens=2)
    deltas = push_each(decoder, token_ids, pb.Finish(reason=LENGTH))
    assert text(deltas).startswith("stop")
    assert decoder.num_tokens > 2
    assert decoder.finish_reason == "stop"


def test_finish_without_tokens() -> None:
    decoder = ChoiceDecoder(TOKENIZER, [])
    decoder.push(output(encode("hello")))
    assert decoder.push(output([], pb.Finish(reason=LENGTH))).finish_reason == "length"
